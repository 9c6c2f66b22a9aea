"""What rows say of each other: equal rows, pairs that contradict each other, and pairs whose sides hardly differ.

Such rows are used all the same; they are counted, so that whoever made the data can look at them. Pairs are compared by
Python's 64-bit hash, a tenth of the time of a digest: it holds for one process, and no other sees it.
"""

import numpy as np

from rlhf.types import Row

EQUAL, CONTRADICTORY, ALIKE = (
    "equal to an earlier row",
    "contradicts another pair",
    "sides differ in case or spaces alone",
)


def compare_sides(row: Row) -> tuple[int, bool, bool]:
    """(hash of the prompt and both sides in either order, whether the sides are in the other order, whether they
    differ in case and white space alone), of a pair."""
    chosen, rejected = row.response or "", row.rejected or ""
    swapped = chosen > rejected
    sides = (rejected, chosen) if swapped else (chosen, rejected)
    prompt = tuple([message.content for message in row.prompt])
    alike = chosen != rejected and row.response_keys == row.rejected_keys and _alike(chosen, rejected)
    return hash((prompt, sides)) % 2**64, swapped, alike


def _alike(first: str, second: str) -> bool:
    # most sides differ in their first character, which is a fifth of the time
    if first.lstrip()[:1].casefold()[:1] != second.lstrip()[:1].casefold()[:1]:
        return False
    return first.casefold().split() == second.casefold().split()


def repetitions(table: np.ndarray) -> dict[str, np.ndarray]:
    """reason -> positions of the rows that have it. table: `data.prepare.gather.TABLE`"""
    _, first = np.unique(table["digest"], return_index=True)
    repeated = np.ones(len(table), dtype=bool)
    repeated[first] = False
    pairs, swapped = table["pair"], table["swapped"]
    in_both_orders = np.intersect1d(pairs[swapped], pairs[~swapped])
    contradictory = np.isin(pairs, in_both_orders)
    marks = {EQUAL: repeated, CONTRADICTORY: contradictory, ALIKE: table["alike"]}
    return {reason: np.flatnonzero(marked) for reason, marked in marks.items()}
