"""One dataset for three stages: rows are divided by content, become ids of bounded length, and are kept on disk."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from data.build import cache
from data.build.encode import Item
from data.build.gather import to_text
from data.build.making import Recipe, make
from data.build.mixture import Origin, origins, places_of_others
from data.build.report import dropped, notes, require_usable
from data.build.split import PHASES
from data.build.store import read_items, to_item
from data.config import DataOptions
from data.read.records import Phase, Skipped
from rlhf.errors import UserError
from rlhf.storage import disk, manifests
from rlhf.text.tokenizer import Template

T = TypeVar("T", bound=Item)

UNCACHED = {"data_workers", "data_cache", "max_dropped", "chat_template"}
"""Options that do not change what is made; the template's text is known with the tokenizer."""
WORTH_JOINING = 0.9
"""share of the tokens of both sides that may be left with the prompt once: attention is slower for such rows"""


@dataclass(frozen=True, slots=True)
class PromptDataset(Sequence[T]):
    """The items of one split for one phase; they lie in a file and are made when asked for.

    T: Demonstration for sft, Preference for reward, Prompt for ppo.
    """

    phase: Phase
    table: datasets.Dataset | None
    positions: np.ndarray
    """where the items stand in `table`, in their order. [N]"""
    dropped: dict[str, int] = field(default_factory=dict)
    """rows left out, counted by reason"""
    shortened: int = 0
    """rows whose prompt or response was cut to length"""
    elements: np.ndarray | None = None
    """the number of the batch element of each: pairs of one ranked list are of one. [N]; None = each its own"""

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        position = int(self.positions[index])
        assert self.table is not None
        # The phase decides the item's type at run time, the annotation of whoever opens the data tells mypy.
        return cast(T, to_item(self.phase, self.table[position]))

    @property
    def batch_elements(self) -> int:
        """How many there are of what `batch_size` counts."""
        return len(self) if self.elements is None else int(self.elements.max(initial=-1)) + 1

    @property
    def weights(self) -> np.ndarray:
        """What each item weighs in a loss where every batch element weighs 1: one over the items of its element. [N]"""
        numbers = np.arange(len(self)) if self.elements is None else self.elements
        return 1 / np.bincount(numbers)[numbers]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item, of the longer side of a pair. [N]"""
        return self.sides[:, 0]

    @property
    def sides(self) -> np.ndarray:
        """Tokens of each item [N, 1]; of the longer and the shorter side of a pair [N, 2]."""
        names = ("length", "shorter") if self.phase == "reward" else ("length",)
        if self.table is None:
            return np.zeros((0, len(names)), dtype=np.int32)
        return np.stack([self.table.data.column(name).to_numpy()[self.positions] for name in names], axis=1)

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of the rows that a model runs for each item. [N, 1]

        Of a pair that is one row with the prompt once, or, if prompts are few of all tokens, both sides [N, 2].
        """
        if self.phase != "reward" or self.table is None:
            return self.sides
        joined = self.sides.sum(1, keepdims=True) - self.prompt_lengths[:, None]
        return joined if joined.sum() < WORTH_JOINING * self.sides.sum() else self.sides

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each item's prompt; of a demonstration, all before the last stretch that is learned. [N]"""
        if self.phase == "ppo":
            return self.lengths
        assert self.table is not None
        if self.phase == "reward":
            return pyarrow.compute.list_value_length(self.table.data.column("prompt")).to_numpy()[self.positions]
        spans = self.table.data.column("spans").combine_chunks()
        ends = np.cumsum(pyarrow.compute.list_value_length(spans).to_numpy(zero_copy_only=False))
        return spans.flatten().to_numpy()[ends[self.positions] - 2]


@dataclass(frozen=True, slots=True)
class Opened(Generic[T]):
    """What one stage trains on and is measured on, and the account of where every row went."""

    train: PromptDataset[T]
    evaluation: PromptDataset[T]
    report: dict[str, Any]
    notes: tuple[str, ...] = ()
    """what a person should know before training"""


def open_datasets(options: DataOptions, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Opened[Any]:
    """The data of one phase, with a tokenizer from `prepare_tokenizer`; made on the first call, read on the next ones.

    The rows come in an order that depends on their content and `data_seed` alone. The evaluation set is empty only
    where eval_fraction or max_eval_rows is 0.
    Raises: UserError if a place cannot be read, a row is malformed, or no row is left for training or evaluation.
    """
    found = origins(options, recipe.phase, recipe.own_places)
    content = [fingerprint(origin, recipe.phase, options) for origin in found]
    read_too = places_of_others(options, recipe.phase, True) if recipe.own_places else []
    later = () if recipe.own_places else PHASES[PHASES.index(recipe.phase) + 1 :]
    others = {f"{phase}_only_data_path" for phase in later}
    folder = cache.cache_root(options.data_cache) / cache.key(
        options=options.model_dump(mode="json", include=set(DataOptions.model_fields) - UNCACHED - others),
        recipe=repr(recipe),
        tokenizer=cache.tokenizer_digest(tokenizer),
        content=content,
        read_too=[fingerprint(origin, phase, options) for phase, origin in read_too],
    )
    with cache.building(folder) as staging:
        if staging is not None:
            report = make(staging, found, options, recipe, Template(tokenizer))
            for place, digest in zip(report["places"], content, strict=True):
                place["fingerprint"] = digest
            report["files"] = {file.name: manifests.digest(file) for file in sorted(staging.iterdir())}
            manifests.write_manifest(staging / cache.REPORT, report)
            disk.flush_tree(staging)
    opened = _read(folder, recipe.phase)
    require_usable(opened.report, recipe.phase, options)
    return replace(opened, notes=tuple(notes(opened.report, recipe.phase, options)))


def _read(folder: Path, phase: Phase) -> Opened[Any]:
    with _sound(folder / cache.REPORT) as path:
        report = disk.read_json(path)
        if report.pop("sha256") != manifests.content_digest(report):
            raise ValueError("it differs from its own sha256")
        files = report.pop("files")
        why = {"train": dropped(report), "evaluation": report["evaluation"]["dropped"]}
        shortened = {name: report[name]["shortened"] for name in why}
    for name, entry in files.items():
        with _sound(folder / name) as path:
            if manifests.digest(path) != entry:
                raise ValueError(f"its content differs from {cache.REPORT}")
    with _sound(folder / "items.arrow"):
        table = read_items(folder)
    sides: dict[str, PromptDataset[Any]] = {}
    for name in why:
        positions = _numbers(folder / f"{name}.npy", len(table or ()))
        elements = _numbers(folder / f"{name}_elements.npy", len(positions)) if phase == "reward" else None
        sides[name] = PromptDataset(phase, table, positions, why[name], shortened[name], elements)
    return Opened(sides["train"], sides["evaluation"], report)


def _numbers(path: Path, below: int) -> np.ndarray:
    """Numbers from 0 and below `below`, mapped into memory."""
    with _sound(path):
        numbers: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        if numbers.ndim != 1 or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < below):
            raise ValueError("positions beyond the items")
        return numbers


@contextlib.contextmanager
def _sound(path: Path) -> Iterator[Path]:
    """Raises: UserError if what is read inside, a file of a set, is damaged or something else."""
    try:
        yield path
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise UserError(
            f"{path}: damaged ({reason}); remove the directory {path.parent}, and its rows are tokenised again"
        ) from None


def fingerprints(options: DataOptions, phase: Phase, own_places: bool = False) -> dict[str, str]:
    """A digest of what is at each place of a phase that is not on the hub."""
    return {
        origin.location: fingerprint(origin, phase, options)
        for origin in origins(options, phase, own_places)
        if not origin.source.remote
    }


def fingerprint(origin: Origin, phase: Phase, options: DataOptions) -> str:
    """What changes whenever the rows do: the source's own word, else a digest of all its rows; and a user's code.

    Of a place that phases share the rows of every phase with a share count, as they decide on the owners of prompts. A
    hub dataset's own word, the commit, is that of all.
    """
    digest = blake2b(origin.code.encode(), digest_size=16)
    shares = zip(PHASES, options.data_split, strict=True)
    others = [other for other, share in shares if share and other != phase]
    shared = origin.use == "shared" and not origin.source.remote and not origin.streaming
    for each in [phase, *(others if shared else ())]:
        own = origin.source.fingerprint
        said = None if own is None else own(each)
        if said is not None:
            digest.update(str(said).encode())
            continue
        for row in origin.rows(each):
            said = row.reason if isinstance(row, Skipped) else f"{row.group}\0{row.ranking}\0{to_text(row, each)}"
            digest.update(f"{said}\n".encode())
    return digest.hexdigest()
