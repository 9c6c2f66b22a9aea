"""Building a tokenised dataset: rows are gathered, selected, tokenised and reported."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data.config import DataOptions
from data.prepare.encode import Recipe, RowEncoder
from data.prepare.gather import GatheredRows, gather
from data.prepare.mixture import Origin
from data.prepare.pack import pack
from data.prepare.report import BEYOND_LIMIT, CUT_TO_HELD_OUT, item_columns, make_report
from data.prepare.split import blend, order_by_group
from data.prepare.store import encode_file
from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.launch.launcher import cores
from rlhf.text.dialogues import Template

MAX_WORKERS = 8
MAX_OVERSAMPLING = 8
"""upper limit of the rows tokenised for each missing one, however many of the earlier rows were dropped"""


def build_dataset(
    folder: Path, origins: Sequence[Origin], options: DataOptions, recipe: Recipe, template: Template
) -> Tree:
    """Write the items, and the item numbers of both splits, into `folder`. Returns the report."""
    raw = folder / "rows.arrow"
    rows = gather(origins, options, recipe, raw, template)
    held_out, train = (_order_rows(rows, rows.table["held_out"] == side) for side in (True, False))
    rows.count(held_out[options.max_eval_rows :], BEYOND_LIMIT["evaluation"])
    held_out = held_out[: options.max_eval_rows]
    queues = _make_queues(rows, train, origins, options.max_train_rows)
    encoder = RowEncoder(recipe, template, options)
    workers = options.data_workers or min(MAX_WORKERS, cores())

    def trainable(item_rows: np.ndarray) -> np.ndarray:
        """Which of these rows, all that are tokenised so far, can train. [len(item_rows)] bool"""
        items = item_columns(folder)
        usable = items["reason"] == ""
        evaluation = np.flatnonzero(usable & np.isin(item_rows, held_out))
        return usable & ~in_evaluation(items, np.arange(len(item_rows)), evaluation)

    item_rows = _tokenise_queues(queues, held_out, partial(encode_file, raw, encoder, workers), trainable)
    item_numbers = np.zeros(len(rows.table), dtype=np.int64)
    item_numbers[item_rows] = np.arange(len(item_rows))
    items = item_columns(folder)
    tokenised = train[np.isin(train, item_rows)]
    splits = {"train": item_numbers[tokenised], "evaluation": item_numbers[held_out]}
    splits = {name: index[items["reason"][index] == ""] for name, index in splits.items()}
    weighted = origins[0].weight is not None
    rows.count(np.setdiff1d(train, tokenised), BEYOND_LIMIT["weight" if weighted else "train"])
    held_out_too = in_evaluation(items, splits["train"], splits["evaluation"])
    rows.count(item_rows[splits["train"][held_out_too]], CUT_TO_HELD_OUT)
    splits["train"] = splits["train"][~held_out_too]
    if weighted:
        splits["train"] = _blend(rows, item_rows, splits["train"], origins, options.max_train_rows)
    elif options.max_train_rows is not None:
        splits["train"], beyond = np.split(splits["train"], [options.max_train_rows])
        rows.count(item_rows[beyond], BEYOND_LIMIT["train"])
    report = make_report(items, rows, origins, item_rows, splits)
    raw.unlink()
    report["train"]["held_out"] = int(held_out_too.sum())
    report["train"]["cut_alike"] = cut_alike(items, rows.table["group"][item_rows], np.unique(splits["train"]))
    for name, index in splits.items():
        np.save(folder / f"{name}.npy", index)
        if recipe.phase == "reward":
            np.save(folder / f"{name}_elements.npy", batch_elements(rows.table["ranking"][item_rows[index]], index))
    if recipe.objective == "text":
        pack(folder, options.max_length)
    return report


def in_evaluation(items: dict[str, np.ndarray], train: np.ndarray, evaluation: np.ndarray) -> np.ndarray:
    """Which training items have the prompt of an evaluation item because one of the two was cut. [len(train)] bool

    items: `item_columns`. Prompts that are equal without a cut are of one group, or have no text at all.
    """
    digests, cut = items["prompt_digest"], items["prompt_cut"]
    evaluated = digests[evaluation]
    alike = cut[train] & np.isin(digests[train], evaluated)
    return alike | np.isin(digests[train], evaluated[cut[evaluation]])


def cut_alike(items: dict[str, np.ndarray], groups: np.ndarray, train: np.ndarray) -> int:
    """The number of training items whose cut prompt is also that of a training item of another group.

    items: `item_columns`. groups: the digest of each item's group [N]. train: the different training items
    """
    digests, cut = items["prompt_digest"], train[items["prompt_cut"][train]]
    alike = train[np.isin(digests[train], digests[cut])]
    pairs = np.unique(np.stack([digests[alike], groups[alike].astype(np.int64)]), axis=1)[0]
    prompts, counts = np.unique(pairs, return_counts=True)
    return int(np.isin(digests[cut], prompts[counts > 1]).sum())


def _order_rows(rows: GatheredRows, selected: np.ndarray) -> np.ndarray:
    positions = np.flatnonzero(selected & rows.usable)
    return positions[order_by_group(rows.table["group"][positions], rows.table["digest"][positions])]


def batch_elements(rankings: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The batch element of each row, numbered in order of first rows. rankings, index, result: [N].

    Rows with one ranking form one element. A row that a weight repeats belongs to another element each time. A row
    without a ranking (0) is its own element.
    """
    if not rankings.any():
        return np.arange(len(index))
    by_item = np.argsort(index, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(index[by_item]) != 0])
    repetition = np.empty(len(index), dtype=np.int64)
    repetition[by_item] = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    member = np.where(rankings == 0, np.arange(len(index)), repetition).astype(np.uint64)
    _, first, labels = np.unique(np.stack([rankings, member]), axis=1, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[labels.reshape(-1)]


@dataclass
class RowQueue:
    """Rows to be tokenised until enough of them are usable."""

    rows: np.ndarray
    """positions, in order"""
    target: int
    """usable rows that are needed"""
    taken: int = 0
    usable: int = 0

    def take(self) -> np.ndarray:
        """The next rows: those missing, divided by the share of earlier rows that were usable."""
        missing = self.target - self.usable
        usable_share = max(self.usable / max(1, self.taken), 1 / MAX_OVERSAMPLING) if self.taken else 1.0
        start, self.taken = self.taken, min(len(self.rows), self.taken + math.ceil(max(0, missing) / usable_share))
        return self.rows[start : self.taken]


def _make_queues(
    rows: GatheredRows, train: np.ndarray, origins: Sequence[Origin], budget: int | None
) -> list[RowQueue]:
    """The training rows, in order. Each weighted origin has its own queue, with a share of the budget."""
    if origins[0].weight is None:
        return [RowQueue(train, len(train) if budget is None else budget)]
    total = sum(origin.weight or 0.0 for origin in origins)
    queues = []
    for i, origin in enumerate(origins):
        own = train[rows.table["origin"][train] == i]
        if origin.weight:
            queues.append(RowQueue(own, len(own) if budget is None else math.ceil(budget * origin.weight / total)))
    return queues


def _tokenise_queues(
    queues: Sequence[RowQueue],
    held_out: np.ndarray,
    tokenise: Callable[[np.ndarray, int], object],
    trainable: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Tokenise the held-out rows, and rows of each queue until its target is reached or it is empty.

    tokenise(positions, round): writes the items of these rows
    trainable(positions of all items so far): which of them can train
    Returns the row position of each item, in the order of writing.
    """
    item_rows: list[np.ndarray] = []
    while True:
        taken = [queue.take() for queue in queues]
        batch = np.sort(np.concatenate([*taken, *([] if item_rows else [held_out])]))
        if item_rows and not len(batch):
            return np.concatenate(item_rows)
        tokenise(batch, len(item_rows))
        item_rows.append(batch)
        rows = np.concatenate(item_rows)
        if all(queue.taken == len(queue.rows) for queue in queues):  # as without a limit: nothing is left to count for
            return rows
        usable = rows[trainable(rows)]
        for queue in queues:
            queue.usable = int(np.isin(queue.rows[: queue.taken], usable).sum())


def _blend(
    rows: GatheredRows, item_rows: np.ndarray, items: np.ndarray, origins: Sequence[Origin], budget: int | None
) -> np.ndarray:
    """Items in proportion to the weights of their origins; some are repeated."""
    weighted = [(i, origin.data_path, origin.weight) for i, origin in enumerate(origins) if origin.weight]
    items_by_origin = [items[rows.table["origin"][item_rows[items]] == i] for i, *_ in weighted]
    for (_, data_path, weight), members in zip(weighted, items_by_origin, strict=True):
        if not len(members):
            raise UserError(f"{data_path}: 0 usable rows, expected some for its weight of {weight:g}")
    picks = blend([len(members) for members in items_by_origin], [weight for *_, weight in weighted], budget)
    chosen = np.array([items_by_origin[source][number] for source, number in picks], dtype=np.int64)
    rows.count(item_rows[np.setdiff1d(items, chosen)], BEYOND_LIMIT["weight"])
    return chosen
