"""Making a set: rows are gathered, chosen, tokenised, and every one of them accounted for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataOptions
from data.encode import LossOn, RowEncoder
from data.gather import Gathered, gather
from data.mixture import Origin
from data.pack import pack
from data.reading import Phase
from data.report import BEYOND, account, outcomes
from data.split import blend, ordered
from data.store import encode_file
from rlhf.config import UserError
from rlhf.launch import cores
from rlhf.text import Template

MOST_WORKERS = 8
SPARE = 2
"""rows of a weighted place that are tokenised for each that is wanted, as some are dropped"""


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
    candidates = _candidates(rows, train, found, options.max_train_rows)
    picked = np.sort(np.concatenate([candidates, held_out]))
    encoder = RowEncoder(recipe.phase, template, options, recipe.loss_on, recipe.objective == "text")
    encode_file(raw, picked, encoder, folder, options.data_workers or min(MOST_WORKERS, cores()))
    raw.unlink()
    kept = outcomes(folder)[0] == ""
    alive = {"train": candidates, "evaluation": held_out}
    sides = {name: _kept(np.searchsorted(picked, order), kept) for name, order in alive.items()}
    if found[0].weight is not None:
        sides["train"] = _blended(rows, picked, sides["train"], found, options.max_train_rows)
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


def _candidates(rows: Gathered, train: np.ndarray, found: Sequence[Origin], budget: int | None) -> np.ndarray:
    """The rows to tokenise for training, in order: of weighted places more than are wanted, but not all."""
    if found[0].weight is None:
        rows.count(train[budget:] if budget else train[:0], BEYOND["train"])
        return train[:budget]
    total = sum(origin.weight or 0.0 for origin in found)
    wanted = np.zeros(len(train), dtype=bool)
    for i, origin in enumerate(found):
        mine = np.flatnonzero(rows.origins[train] == i)
        most = None if budget is None else SPARE * math.ceil(budget * (origin.weight or 0.0) / total)
        wanted[mine[:most]] = bool(origin.weight)
    rows.count(train[~wanted], BEYOND["weight"])
    return train[wanted]


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
