"""One dataset for three stages: rows are divided by content, become ids of bounded length, and are kept on disk."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from data import cache
from data.config import DataOptions
from data.encode import Encoder, Item, LossOn
from data.gather import ELSEWHERE, Gathered, gather, to_text
from data.mixture import Origin, origins
from data.pack import pack
from data.reading import Phase, Skipped
from data.split import PHASES, blend, ordered
from data.store import encode_file, read_items, to_item
from rlhf.config import UserError
from rlhf.text import Template

UNCACHED = ("data_workers", "data_cache")
"""Options that do not change what is made."""


@dataclass(frozen=True, slots=True)
class PromptDataset(Sequence[Item]):
    """The items of one split for one phase; they lie in a file and are made when asked for."""

    phase: Phase
    table: datasets.Dataset | None
    positions: np.ndarray
    """where the items stand in `table`, in their order. [N]"""
    dropped: dict[str, int] = field(default_factory=dict)
    """rows left out, counted by reason"""
    shortened: int = 0
    """rows whose prompt or response was cut to length"""

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        position = int(self.positions[index])
        assert self.table is not None
        return to_item(self.phase, self.table[position])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item, of the longer side of a pair. [N]"""
        if self.table is None:
            return np.zeros(0, dtype=np.int32)
        return self.table.data.column("length").to_numpy()[self.positions]


@dataclass(frozen=True, slots=True)
class Opened:
    """What one stage trains on and is measured on, and the account of where every row went."""

    train: PromptDataset
    evaluation: PromptDataset
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of one phase become items."""

    phase: Phase
    loss_on: LossOn = "last"
    objective: str = "response"
    response_length: int = 0
    """tokens that PPO will add to a prompt"""


def open_datasets(options: DataOptions, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Opened:
    """The data of one phase, with a tokenizer from `prepare_tokenizer`; made on the first call, read on the next ones.

    The rows come in an order that depends on their content and `data_seed` alone. The evaluation set is empty only
    where eval_fraction or max_eval_rows is 0.
    Raises: UserError if a place cannot be read, a row is malformed, or no row is left for training or evaluation.
    """
    _require_room(options, recipe)
    found = origins(options, recipe.phase)
    content = [fingerprint(origin, recipe.phase) for origin in found]
    folder = cache.cache_root(options.data_cache) / cache.key(
        options=options.model_dump(mode="json", exclude=set(UNCACHED)),
        recipe=repr(recipe),
        tokenizer=cache.tokenizer_digest(tokenizer),
        content=content,
    )
    with cache.building(folder) as staging:
        if staging is not None:
            report = _make(staging, found, options, recipe, Template(tokenizer))
            for place, digest in zip(report["places"], content, strict=True):
                place["fingerprint"] = digest
            (staging / cache.REPORT).write_text(json.dumps(report, ensure_ascii=False, indent=1), encoding="utf-8")
    return _read(folder, recipe.phase)


def fingerprints(options: DataOptions, phase: Phase) -> dict[str, str]:
    """A digest of what is at each place of a phase that is not on the hub."""
    return {
        origin.location: fingerprint(origin, phase)
        for origin in origins(options, phase)
        if not getattr(origin.source, "remote", False)
    }


def fingerprint(origin: Origin, phase: Phase) -> str:
    """What changes whenever the rows do: the source's own word, else a digest of all its rows."""
    own = getattr(origin.source, "fingerprint", None)
    said = None if own is None else own(phase)
    if said is not None:
        return str(said)
    digest = blake2b(digest_size=16)
    for row in origin.rows(phase):
        said = row.reason if isinstance(row, Skipped) else f"{row.group}\0{to_text(row, phase)}"
        digest.update(f"{said}\n".encode())
    return digest.hexdigest()


def _require_room(options: DataOptions, recipe: Recipe) -> None:
    assert recipe.phase in PHASES
    tokens = options.max_prompt_length + recipe.response_length
    if recipe.phase == "ppo" and tokens > options.max_length:
        raise UserError(
            f"max_prompt_length {options.max_prompt_length} + response length {recipe.response_length}: got {tokens} "
            f"tokens, expected at most max_length {options.max_length}; lower max_prompt_length or raise max_length"
        )


def _make(
    folder: Path, found: list[Origin], options: DataOptions, recipe: Recipe, template: Template
) -> dict[str, Any]:
    """Everything that `_read` reads but the report, which is returned: it is written last."""
    raw = folder / "rows.arrow"
    rows = gather(found, options, recipe.phase, raw)
    train, held_out = _chosen(rows, found, options)
    picked = np.unique(np.concatenate([train, held_out]))
    encoder = Encoder(recipe.phase, template, options, recipe.loss_on, recipe.objective == "text")
    encode_file(raw, picked, encoder, folder, options.data_workers or min(8, os.cpu_count() or 1))
    raw.unlink()
    place = np.zeros(len(rows.origins), dtype=np.int64)
    place[picked] = np.arange(len(picked))
    report = _account(folder, rows, found, (place[train], place[held_out]), picked)
    _refuse(report, recipe.phase, options, written=len(rows.origins))
    if recipe.objective == "text":
        pack(folder, options.max_length)
    return report


def _chosen(rows: Gathered, found: list[Origin], options: DataOptions) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the rows to train on (some of them repeatedly, where weights ask for it) and of those held out."""
    held_out, train = (_in_order(rows, side & rows.usable) for side in (rows.held_out, ~rows.held_out))
    rows.drop(held_out[options.max_eval_rows :], "beyond max_eval_rows")
    if found[0].weight is None:
        rows.drop(train[options.max_train_rows :] if options.max_train_rows else train[:0], "beyond max_train_rows")
        chosen = train[: options.max_train_rows]
    else:
        chosen = _blended(rows, train, found, options.max_train_rows)
        rows.drop(np.setdiff1d(train, chosen), "beyond its weight")
    return chosen, held_out[: options.max_eval_rows]


def _in_order(rows: Gathered, side: np.ndarray) -> np.ndarray:
    positions = np.flatnonzero(side)
    return positions[ordered(rows.groups[positions], rows.digests[positions])]


def _blended(rows: Gathered, order: np.ndarray, found: list[Origin], budget: int | None) -> np.ndarray:
    weighted = [(i, origin) for i, origin in enumerate(found) if origin.weight]
    own = [order[rows.origins[order] == i] for i, _ in weighted]
    for (_, origin), members in zip(weighted, own, strict=True):
        if not len(members):
            raise UserError(f"{origin.location}: 0 usable rows, expected some for its weight of {origin.weight:g}")
    picks = blend([len(members) for members in own], [float(origin.weight or 0) for _, origin in weighted], budget)
    return np.array([own[source][number] for source, number in picks], dtype=np.int64)


def _account(
    folder: Path,
    rows: Gathered,
    found: list[Origin],
    sides: tuple[np.ndarray, np.ndarray],
    picked: np.ndarray,
) -> dict[str, Any]:
    """Save the index of each side without what the encoder dropped; say what became of every row of every origin."""
    reasons, cut, lengths = _outcomes(folder)
    report: dict[str, Any] = {}
    for name, index in zip(("train", "evaluation"), sides, strict=True):
        kept = index[reasons[index] == ""]
        np.save(folder / f"{name}.npy", kept)
        once = np.unique(index)
        lost = once[reasons[once] != ""]
        rows.drop(picked[once[reasons[once] == ""]], name)
        for reason in np.unique(reasons[lost]):
            rows.drop(picked[lost[reasons[lost] == reason]], str(reason))
        owners = rows.origins[picked[kept]]
        report[name] = {
            "rows": len(kept),
            "shortened": int(cut[np.unique(kept)].sum()),
            "dropped": _counted(reasons[lost]),
            "rows_by_place": np.bincount(owners, minlength=len(found)).tolist(),
            "tokens_by_place": np.bincount(owners, weights=lengths[kept], minlength=len(found)).astype(int).tolist(),
        }
    report["places"] = [
        {"place": o.location, "use": o.use, "rows": ledger.rows, "fates": dict(ledger.fates), "bad": ledger.bad}
        for o, ledger in zip(found, rows.ledgers, strict=True)
    ]
    return report


def _outcomes(folder: Path) -> list[np.ndarray]:
    """Of each item: why it was dropped (empty if it was not), whether it was cut to length, its tokens."""
    table, kinds = read_items(folder), {"reason": object, "cut": bool, "length": int}
    return [np.array(table.data.column(name) if table is not None else [], kind) for name, kind in kinds.items()]


def _refuse(report: dict[str, Any], phase: Phase, options: DataOptions, written: int) -> None:
    """Raises: UserError if nothing is left to train or to evaluate on, or too much of it had to be dropped.

    `written`: rows that the tokenizer could have got, those that are empty left out.
    """
    wanted = {"train": "training"}
    if options.eval_data_path or (options.eval_fraction and options.max_eval_rows):
        wanted["evaluation"] = "evaluation"
    places = report["places"]
    total = sum(place["rows"] for place in places)
    said = ", ".join(f"{count} {reason}" for reason, count in fates(report).items())
    where = f"{', '.join(place['place'] for place in places)}"
    for name, use in wanted.items():
        if not report[name]["rows"]:
            raise UserError(
                f"{where}: 0 usable rows for {use} in {phase}; of {total} rows: {said or 'none'}; add rows, or change "
                f"--data-split ({','.join(f'{share:g}' for share in options.data_split)}), --eval-fraction "
                f"({options.eval_fraction:g}), --max-length ({options.max_length}) or --max-prompt-length "
                f"({options.max_prompt_length})"
            )
    dropped = report["train"]["dropped"]
    empty = {reason: count for reason, count in fates(report).items() if reason in EMPTY}
    kept = report["train"]["rows"] * written
    every = (report["train"]["rows"] + sum(dropped.values())) * (written + sum(empty.values()))
    share = (every - kept) / every
    if share > options.max_dropped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in (empty | dropped).items())
        long = any("long" in reason or "truncation" in reason for reason in dropped)
        cure = "raise --max-length or --max-prompt-length, or say --truncate tokens" if long else "mend the data"
        raise UserError(
            f"{where}: {share:.0%} of the training rows of {phase} cannot be used ({reasons}); expected at most "
            f"{options.max_dropped:.0%} (--max-dropped); {cure}"
        )


def fates(report: dict[str, Any]) -> dict[str, int]:
    """What became of the rows of all places, the most frequent first."""
    total: Counter[str] = Counter()
    for place in report["places"]:
        total.update(place["fates"])
    return dict(total.most_common())


EMPTY = ("empty prompt", "empty response")
"""Fates of rows that come to nothing before the tokenizer."""

KEPT = ("train", "evaluation", ELSEWHERE, "beyond max_train_rows", "beyond max_eval_rows", "beyond its weight")
"""Fates of rows that nothing is wrong with."""


def _read(folder: Path, phase: Phase) -> Opened:
    report = json.loads((folder / cache.REPORT).read_text(encoding="utf-8"))
    table = read_items(folder)
    dropped = {reason: count for reason, count in fates(report).items() if reason not in KEPT}
    train, evaluation = (
        PromptDataset(phase, table, np.load(folder / f"{name}.npy", mmap_mode="r"), why, report[name]["shortened"])
        for name, why in (("train", dropped), ("evaluation", report["evaluation"]["dropped"]))
    )
    return Opened(train, evaluation, report)


def _counted(reasons: np.ndarray) -> dict[str, int]:
    names, counts = np.unique(reasons, return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}
