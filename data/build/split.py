"""Which rows belong to which phase, and in what order: decided by their content, never by their place in a file.

64-bit digests stand for texts. Among a million rows two different ones collide with probability 3e-8.
"""

import re
import struct
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from data.config import DataOptions
from data.read.columns import opening
from data.read.records import Phase
from rlhf.types import Row

PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")
WORDS = re.compile(r"\w+")


def share_of(row: Row, options: DataOptions) -> str:
    """'evaluation', or the phase the row's group belongs to if every phase with a share has a use for it.

    Depends on the group's text and `data_seed` alone.
    """
    return share_at(*group_digest(row, options.data_seed)[:2], options)


def share_at(one: int, other: int, options: DataOptions) -> str:
    """The share of two 64-bit numbers: the first decides on evaluation, the second on the phase."""
    if not options.eval_data_path and one / 2**64 < options.eval_fraction:
        return "evaluation"
    return phase_at(other, options.data_split)


def phase_at(point: int, shares: Sequence[float]) -> Phase:
    """The phase whose part of the 64-bit numbers has `point`, if they are divided by `shares`."""
    left = point / 2**64 * sum(shares)
    for phase, share in zip(PHASES, shares, strict=True):
        if left < share:
            return phase
        left -= share
    return max(zip(shares, PHASES, strict=True))[1]  # rounding at the upper edge


def group_of(row: Row) -> str:
    """What decides the split: the row's group, else what the first user says, else the prompt, else the response.

    So a dialogue and its continuations are one group. Near-duplicates that differ in case, spaces, punctuation or the
    form of a letter (NFKC) are the same.
    """
    texts = (row.group, opening(row.prompt), " ".join(message.content for message in row.prompt), row.response or "")
    return normalised(next((text for text in texts if text.strip()), ""))


def normalised(text: str) -> str:
    """The words of a text; of a text without words, what it is apart from spaces."""
    folded = text.casefold() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    return " ".join(WORDS.findall(folded) or folded.split())


def group_digest(row: Row, seed: int) -> tuple[int, int, int]:
    """Three independent 64-bit numbers of the row's group: two for `share_at`, one to sort and compare by."""
    one, other, identity = struct.unpack("<3Q", blake2b(f"{seed}\0{group_of(row)}".encode(), digest_size=24).digest())
    return one, other, identity


def text_digest(text: str, seed: int) -> int:
    """A 64-bit number of a text."""
    return int.from_bytes(blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest())


def ordered(groups: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Positions by digest: one row of every group, then a second one, and so on. groups, rows, result [N].

    So the first N rows speak of as many prompts as can be, and of the same ones in every phase.
    """
    by_group = np.lexsort((rows, groups))
    found = groups[by_group]
    starts = np.flatnonzero(np.r_[True, found[1:] != found[:-1]]) if len(found) else np.zeros(0, dtype=np.int64)
    sizes = np.diff(np.r_[starts, len(found)])
    rank = np.arange(len(found)) - np.repeat(starts, sizes)
    return by_group[np.lexsort((found, rank))]


def blend(counts: Sequence[int], weights: Sequence[float], budget: int | None) -> np.ndarray:
    """Rows of several sources in proportion to `weights`: [N, 2] (source, number among its rows).

    N is `budget`, or without one as many as can be with no row twice. A source with too few rows starts again from
    its first. The sources alternate evenly, so that any stretch of the result has nearly their proportion.
    """
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    size = budget if budget is not None else int(min(n / share for n, share in zip(counts, shares, strict=True)) + 1e-9)
    exact = shares * size
    takes = np.floor(exact).astype(np.int64)
    for i in np.argsort(takes - exact, kind="stable")[: size - takes.sum()]:
        takes[i] += 1
    picks = [
        np.stack([np.full(take, i), np.arange(take) % max(1, n), (2 * np.arange(take) + 1) * (size / max(1, take))])
        for i, (take, n) in enumerate(zip(takes, counts, strict=True))
    ]
    merged = np.concatenate(picks, axis=1)
    return merged[:2, np.argsort(merged[2], kind="stable")].T.astype(np.int64)
