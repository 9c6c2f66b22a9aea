"""The dataset of each stage: rows are divided by content, tokenised to bounded length, and cached on disk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.prepare import cache
from data.prepare.encode import Item, Recipe
from data.prepare.gather import row_to_json
from data.prepare.mixture import Origin, origins, origins_of_other_phases
from data.prepare.pipeline import build_dataset
from data.prepare.report import REQUIRED, count_outcomes, data_warnings, division_notes, dropped, hints, require_usable
from data.prepare.split import PHASES
from data.prepare.store import read_items, to_item
from data.read.records import Phase, Skipped
from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.storage import disk, manifests
from rlhf.text.dialogues import Template

T = TypeVar("T", bound=Item)

NOT_IN_CACHE_KEY = {"data_workers", "data_cache", "max_dropped", "chat_template", "chat_template_kwargs"}
"""options that do not change the items; the tokenizer's digest includes the template"""
MAX_JOINED_SHARE = 0.9
"""pairs are joined if that leaves at most this share of the tokens: attention is slower for joined rows"""


@dataclass(frozen=True, slots=True)
class PromptDataset(Sequence[T]):
    """The items of one split for one phase. They are in a file, and each is built on access.

    T: Demonstration for sft, Preference for reward, Prompt for ppo.
    """

    phase: Phase
    table: datasets.Dataset
    positions: np.ndarray
    """rows of `table` that are the items, in order. [N]"""
    dropped: dict[str, int] = field(default_factory=dict)
    """reason -> rows that were left out"""
    elements: np.ndarray | None = None
    """the batch element of each item: pairs of one ranked list share one. [N]; None = each item is its own"""

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        # The phase determines the item's type at run time; the caller's annotation tells mypy.
        return cast(T, to_item(self.phase, self.table[int(self.positions[index])]))

    @property
    def batch_elements(self) -> int:
        """The number of batch elements, which `batch_size` counts."""
        return len(self) if self.elements is None else int(self.elements.max(initial=-1)) + 1

    @property
    def weights(self) -> np.ndarray:
        """The loss weight of each item: its own, divided by the items of its batch element, so that an element weighs
        1. [N]"""
        numbers = np.arange(len(self)) if self.elements is None else self.elements
        own = 1.0 if self.phase == "ppo" else self._column("weight")
        return own / np.bincount(numbers)[numbers]

    @property
    def subsets(self) -> tuple[str, ...]:
        """The group that each item is evaluated with; empty if no item has one. [N]"""
        names = self.table.data.column("subset").take(self.positions).to_pylist()
        return tuple(names) if any(names) else ()

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item; of a pair, of its longer side. [N]"""
        return self.sides[:, 0]

    @property
    def sides(self) -> np.ndarray:
        """Tokens of each item [N, 1]; of pairs, of the longer and the shorter side [N, 2]."""
        names = ("length", "shorter") if self.phase == "reward" else ("length",)
        return np.stack([self._column(name) for name in names], axis=1)

    def _column(self, name: str) -> np.ndarray:
        """A column of numbers of the items. [N]"""
        values: np.ndarray = self.table.data.column(name).to_numpy()[self.positions]
        return values

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of the rows that a model computes for each item. [N, 1]

        A pair is one row with a common prompt; or, if that saves too little, two rows [N, 2].
        """
        if self.phase != "reward":
            return self.sides
        joined = self.sides.sum(1, keepdims=True) - self.prompt_lengths[:, None]
        return joined if joined.sum() < MAX_JOINED_SHARE * self.sides.sum() else self.sides

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each item's prompt; of a demonstration, all before the last span of the loss. [N]"""
        if self.phase == "ppo":
            return self.lengths
        if self.phase == "reward":
            return pyarrow.compute.list_value_length(self.table.data.column("prompt")).to_numpy()[self.positions]
        spans = self.table.data.column("spans").combine_chunks()
        ends = np.cumsum(pyarrow.compute.list_value_length(spans).to_numpy(zero_copy_only=False))
        return spans.flatten().to_numpy()[ends[self.positions] - 2]


@dataclass(frozen=True, slots=True)
class PhaseData(Generic[T]):
    """The training and evaluation data of one phase, and the report on every row."""

    train: PromptDataset[T]
    evaluation: PromptDataset[T]
    report: Tree
    notes: tuple[str, ...] = ()
    """warnings to print before training"""
    notes_of_run: tuple[str, ...] = ()
    """those that are printed by the first stage of a run only"""


def open_datasets(options: DataOptions, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PhaseData[Any]:
    """The data of one phase, built on the first call and read from the cache on later ones.

    tokenizer: from `prepare_tokenizer`. The order of the rows depends only on their content and `data_seed`. The
    evaluation split is empty only if eval_fraction or max_eval_rows is 0.
    Raises: UserError if a data path cannot be read, a row is malformed, or no row is left for training or evaluation.
    """
    own_origins = origins(options, recipe.phase, recipe.own_data_only)
    own_fingerprints = [fingerprint(origin, recipe.phase, options) for origin in own_origins]
    other_origins = _read_too(options, recipe.phase, recipe.own_data_only)
    read_too = {name: fingerprint(origin, phase, options) for name, (phase, origin) in other_origins.items()}
    later_phases = () if recipe.own_data_only else PHASES[PHASES.index(recipe.phase) + 1 :]
    excluded = {f"{phase}_only_data_path" for phase in later_phases}
    folder = cache.cache_root(options.data_cache) / cache.cache_key(
        options=options.model_dump(mode="json", include=set(DataOptions.model_fields) - NOT_IN_CACHE_KEY - excluded),
        recipe=repr(recipe),
        tokenizer=cache.tokenizer_digest(tokenizer),
        content=own_fingerprints,
        read_too=[*read_too.values()],
    )
    with cache.build_entry(folder) as staging:
        if staging is not None:
            report = build_dataset(staging, own_origins, options, recipe, Template(tokenizer))
            for source, digest in zip(report["sources"], own_fingerprints, strict=True):
                source["fingerprint"] = digest
            files = sorted(staging.iterdir())
            report["files"] = {f.name: manifests.digest(f) | {"written": f.stat().st_mtime_ns} for f in files}
            manifests.write_manifest(staging / cache.REPORT, report)
            disk.flush_tree(staging)
    report = _read_report(folder)
    require_usable(report, recipe.phase, options)
    report["read_too"] = read_too
    table = read_items(folder)
    assert table is not None  # `require_usable` has found a row

    def split(name: str, reasons: dict[str, int]) -> PromptDataset[Any]:
        elements = _load_indices(folder / f"{name}_elements.npy") if recipe.phase == "reward" else None
        return PromptDataset(recipe.phase, table, _load_indices(folder / f"{name}.npy"), reasons, elements)

    splits = split("train", dropped(report)), split("evaluation", report["evaluation"]["dropped"])
    of_run = tuple(division_notes(report, recipe.phase, options))
    return PhaseData(*splits, report, tuple(data_warnings(report, options)), of_run)


def _read_too(options: DataOptions, phase: Phase, own_data_only: bool) -> dict[str, tuple[Phase, Origin]]:
    """name -> (phase, origin) of the own paths of other phases whose prompts decide on rows of `phase`.

    With `own_data_only` also of the shared ones, which are among the origins of the phase otherwise.
    """
    if not own_data_only and not getattr(options, f"{phase}_only_data_path"):
        return {}
    return {
        f"{origin.data_path} (of {other})": (other, origin)
        for other, origin in origins_of_other_phases(options, phase, own_data_only)
        if own_data_only or (origin.use == "only" and not origin.streaming)
    }


def _read_report(folder: Path) -> Tree:
    """Raises: UserError if a file of the entry differs from what was written."""
    path = folder / cache.REPORT
    try:
        report: Tree = disk.read_json(path)
        if report.pop("sha256") != manifests.content_digest(report):
            raise ValueError("it differs from its own sha256")
        report.pop("format", None)
        for name, entry in report.pop("files").items():
            path = folder / name
            written, status = entry.pop("written"), path.stat()
            # Every process opens the entry, and hashing 50 GB takes a minute: only files that were written since.
            untouched = (status.st_size, status.st_mtime_ns) == (entry["size"], written)
            if not untouched and manifests.digest(path) != entry:
                raise ValueError(f"its content differs from {cache.REPORT}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise UserError(
            f"{path}: damaged ({reason}); remove the directory {folder}, and its rows are tokenised again"
        ) from None
    return report


def _load_indices(path: Path) -> np.ndarray:
    numbers: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return numbers


def fingerprints(options: DataOptions, phase: Phase, own_data_only: bool = False) -> dict[str, str]:
    """data path -> fingerprint, for each data path that a phase reads and that is not on the hub."""
    read = {origin.data_path: (phase, origin) for origin in origins(options, phase, own_data_only)}
    read |= _read_too(options, phase, own_data_only)
    return {name: fingerprint(origin, of, options) for name, (of, origin) in read.items() if not origin.source.remote}


def fingerprint(origin: Origin, phase: Phase, options: DataOptions) -> str:
    """A digest that changes whenever the rows or the code of a user's source change.

    It contains the source's own fingerprint, or else all its rows. A shared origin contributes the rows of every phase
    with a share, because they decide on the owners of prompts; for a hub dataset the commit covers all phases.
    """
    digest = blake2b(origin.code.encode(), digest_size=16)
    shares = zip(PHASES, options.data_split, strict=True)
    other_phases = [other_phase for other_phase, share in shares if share and other_phase != phase]
    shared = origin.use == "shared" and not origin.source.remote and not origin.streaming
    for read_phase in [phase, *(other_phases if shared else ())]:
        source_fingerprint = origin.source.fingerprint
        text = None if source_fingerprint is None else source_fingerprint(read_phase)
        if text is not None:
            digest.update(str(text).encode())
            continue
        for row in origin.rows(read_phase):
            text = (
                row.reason
                if isinstance(row, Skipped)
                else f"{row.group}\0{row.ranking}\0{row_to_json(row, read_phase)}"
            )
            digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def require_rows(opened: PhaseData, options: DataOptions, batch_size: int, ranks: int = 1) -> None:
    """Raises: UserError if the rows do not fill a training batch, or not every rank gets a row for evaluation."""
    train, held_out, phase = opened.train.batch_elements, len(opened.evaluation), opened.train.phase
    if not options.eval_fraction and not options.eval_data_path:
        raise UserError("--eval-fraction 0: every stage is evaluated on held-out rows; expected more than 0")
    if options.group_column and phase != "sft" and held_out and not opened.evaluation.subsets:
        raise UserError(
            f"--group-column {options.group_column}: no held-out row has this column, expected one with names"
        )
    if train >= batch_size and held_out >= ranks:
        return
    sources = opened.report["sources"]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(opened.report).items())
    raise UserError(
        f"{', '.join(source['data_path'] for source in sources)}: {phase} got {train} rows with {REQUIRED[phase]} "
        f"to train on and {held_out} held out, of {sum(source['rows'] for source in sources)} rows ({counts}); "
        f"expected at least {batch_size} (one batch) and {ranks}; add rows, raise --max-train-rows and "
        "--max-eval-rows, or lower --batch-size" + hints(opened.report)
    )
