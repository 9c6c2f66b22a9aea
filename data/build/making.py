"""Making a set: rows are gathered, chosen, tokenised, and every one of them accounted for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.build.encode import LossOn, RowEncoder
from data.build.gather import Gathered, gather
from data.build.mixture import Origin
from data.build.pack import pack
from data.build.report import BEYOND, account, outcomes
from data.build.split import blend, ordered
from data.build.store import encode_file
from data.config import DataOptions
from data.read.records import Phase
from rlhf.errors import UserError
from rlhf.launch.launcher import cores
from rlhf.text.tokenizer import Template

MOST_WORKERS = 8
MOST_MORE = 8
"""times as many rows are tokenised again at most as are missing, whatever share of the earlier ones was dropped"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of one phase become items."""

    phase: Phase
    loss_on: LossOn = "last"
    objective: str = "response"
    own_places: bool = False
    """only the phase's own places are learned, without the prompts of any other phase and those held out"""


def make(
    folder: Path, found: Sequence[Origin], options: DataOptions, recipe: Recipe, template: Template
) -> dict[str, Any]:
    """Items and both sides' indices into `folder`; the report on them."""
    raw = folder / "rows.arrow"
    rows = gather(found, options, recipe.phase, raw, recipe.own_places)
    held_out, train = (_in_order(rows, side & rows.usable) for side in (rows.held_out, ~rows.held_out))
    rows.count(held_out[options.max_eval_rows :], BEYOND["evaluation"])
    held_out = held_out[: options.max_eval_rows]
    queues = _queues(rows, train, found, options.max_train_rows)
    encoder = RowEncoder(recipe.phase, template, options, recipe.loss_on, recipe.objective == "text")
    workers = options.data_workers or min(MOST_WORKERS, cores())
    picked = _tokenised(queues, held_out, partial(encode_file, raw, encoder, folder, workers))
    raw.unlink()
    number = np.zeros(len(rows.origins), dtype=np.int64)
    number[picked] = np.arange(len(picked))
    kept = outcomes(folder)[0] == ""
    tried = train[np.isin(train, picked)]
    sides = {name: _kept(number[order], kept) for name, order in {"train": tried, "evaluation": held_out}.items()}
    weighted = found[0].weight is not None
    rows.count(np.setdiff1d(train, tried), BEYOND["weight" if weighted else "train"])
    if weighted:
        sides["train"] = _blended(rows, picked, sides["train"], found, options.max_train_rows)
    elif options.max_train_rows is not None:
        sides["train"], beyond = np.split(sides["train"], [options.max_train_rows])
        rows.count(picked[beyond], BEYOND["train"])
    report = account(folder, rows, found, picked, sides)
    for name, index in sides.items():
        np.save(folder / f"{name}.npy", index)
        if recipe.phase == "reward":
            np.save(folder / f"{name}_elements.npy", batch_elements(rows.rankings[picked[index]], index))
    if recipe.objective == "text":
        pack(folder, options.max_length)
    return report


def _in_order(rows: Gathered, side: np.ndarray) -> np.ndarray:
    positions = np.flatnonzero(side)
    return positions[ordered(rows.groups[positions], rows.digests[positions])]


def batch_elements(rankings: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The number of the batch element that each row is of, in order of their first rows. rankings, index, result [N].

    Rows of one ranking are of one element; where a place's weight repeats a row, the second time is another element's.
    A row without a ranking (0) is an element of its own.
    """
    if not rankings.any():
        return np.arange(len(index))
    by_item = np.argsort(index, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(index[by_item]) != 0])
    times = np.empty(len(index), dtype=np.int64)
    times[by_item] = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    own = np.where(rankings == 0, np.arange(len(index)), times).astype(np.uint64)
    _, first, numbers = np.unique(np.stack([rankings, own]), axis=1, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[numbers.reshape(-1)]


def _kept(index: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return index[kept[index]]


@dataclass
class Queue:
    """Rows that wait to be tokenised until enough of them can be used."""

    rows: np.ndarray
    """positions, in the order in which they are taken"""
    wanted: int
    taken: int = 0
    usable: int = 0

    def take(self) -> np.ndarray:
        """The next rows: as many as are missing, and more the more of the earlier ones were dropped."""
        missing = self.wanted - self.usable
        share = max(self.usable / max(1, self.taken), 1 / MOST_MORE) if self.taken else 1.0
        start, self.taken = self.taken, min(len(self.rows), self.taken + math.ceil(max(0, missing) / share))
        return self.rows[start : self.taken]


def _queues(rows: Gathered, train: np.ndarray, found: Sequence[Origin], budget: int | None) -> list[Queue]:
    """The rows to train on, in order: those of each weighted place apart, each of which has a share of the budget."""
    if found[0].weight is None:
        return [Queue(train, len(train) if budget is None else budget)]
    total = sum(origin.weight or 0.0 for origin in found)
    queues = []
    for i, origin in enumerate(found):
        own = train[rows.origins[train] == i]
        if origin.weight:
            queues.append(Queue(own, len(own) if budget is None else math.ceil(budget * origin.weight / total)))
    return queues


def _tokenised(
    queues: Sequence[Queue], held_out: np.ndarray, tokenise: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """Tokenise held-out rows and rows of each queue until it has as many usable ones as are wanted, or is empty.

    tokenise(positions, round): writes the items of these rows; which of them can be used.
    Returns the positions of all items, in the order in which they were written.
    """
    picked: list[np.ndarray] = []
    while True:
        taken = [queue.take() for queue in queues]
        batch = np.sort(np.concatenate([*taken, *([] if picked else [held_out])]))
        if picked and not len(batch):
            return np.concatenate(picked)
        usable = batch[tokenise(batch, len(picked))]
        for queue, mine in zip(queues, taken, strict=True):
            queue.usable += int(np.isin(mine, usable).sum())
        picked.append(batch)


def _blended(
    rows: Gathered, picked: np.ndarray, alive: np.ndarray, found: Sequence[Origin], budget: int | None
) -> np.ndarray:
    """Items in the proportion of their places' weights, some of them repeated."""
    weighted = [(i, origin.location, origin.weight) for i, origin in enumerate(found) if origin.weight]
    own = [alive[rows.origins[picked[alive]] == i] for i, *_ in weighted]
    for (_, location, weight), members in zip(weighted, own, strict=True):
        if not len(members):
            raise UserError(f"{location}: 0 usable rows, expected some for its weight of {weight:g}")
    picks = blend([len(members) for members in own], [weight for *_, weight in weighted], budget)
    chosen = np.array([own[source][number] for source, number in picks], dtype=np.int64)
    rows.count(picked[np.setdiff1d(alive, chosen)], BEYOND["weight"])
    return chosen
