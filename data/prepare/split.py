"""Which rows belong to which phase, and in what order. Both depend on the content, never on the position in a file.

Texts are compared by 64-bit digests. Among a million rows, two different texts collide with probability 3e-8.
"""

import re
import struct
import unicodedata
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from data.config import DataOptions
from data.read.columns import first_user_text
from data.read.records import Phase
from rlhf.types import Row

PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")
OWN_GROUP = "split_group"
"""the column that names the group of a row: rows of one group are in one share"""
WORDS = re.compile(r"\w+")
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
ASCII_WORDS = b" " * 48 + b"0123456789" + b" " * 7 + LETTERS + b"    _ " + LETTERS + b" " * 133
"""letters, digits and _ of ASCII in lower case; all others are spaces"""


def share_of_points(evaluation_point: int, phase_point: int, options: DataOptions) -> str:
    """The share of two 64-bit numbers: the first decides on evaluation, the second on the phase."""
    if not options.eval_data_path and evaluation_point / 2**64 < options.eval_fraction:
        return "evaluation"
    return phase_of_point(phase_point, options.data_split)


def phase_of_point(point: int, shares: Sequence[float]) -> Phase:
    """The phase of `point`, if the 64-bit numbers are divided among the phases in proportion to `shares`."""
    remaining = point / 2**64 * sum(shares)
    for phase, share in zip(PHASES, shares, strict=True):
        if remaining < share:
            return phase
        remaining -= share
    return max(zip(shares, PHASES, strict=True))[1]  # rounding at the upper end


def group_of(row: Row) -> str:
    """The text that decides the split: the first of `_group_texts` that is not empty.

    So a dialogue and its continuations are one group. Texts that differ only in case, spaces, punctuation or Unicode
    form (NFKC) are equal.
    """
    return normalise(next(filter(str.strip, _group_texts(row)), ""))


def _group_texts(row: Row) -> Iterator[str]:
    """The column `split_group`, the row's group, the first user message, the prompt without the system message, the
    response, the system message."""
    named = row.columns.get(OWN_GROUP)
    yield str(named) if isinstance(named, str | int) else ""
    yield row.group
    yield first_user_text(row.prompt)
    yield " ".join(message.content for message in row.prompt if message.role != "system")
    yield row.response or ""
    yield " ".join(message.content for message in row.prompt)


def normalise(text: str) -> str:
    """The words of a text in lower case; a text without words only loses repeated spaces."""
    if text.isascii():  # the same words in a third of the time
        words = text.encode().translate(ASCII_WORDS).split()
        return b" ".join(words).decode() if words else " ".join(text.split())
    lower = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(WORDS.findall(lower) or lower.split())


def group_digest(row: Row, seed: int) -> tuple[int, int, int]:
    """Three independent 64-bit digests of the row's group: two for `share_of_points`, one to compare and sort by."""
    evaluation_point, phase_point, identity = struct.unpack(
        "<3Q", blake2b(f"{seed}\0{group_of(row)}".encode(), digest_size=24).digest()
    )
    return evaluation_point, phase_point, identity


def text_digest(text: str, seed: int) -> int:
    """A 64-bit digest of a text."""
    return int.from_bytes(blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest())


def order_by_group(groups: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Positions in order of digest: one row of every group, then a second one, and so on. groups, rows, result: [N].

    So the first rows have as many different prompts as possible, and the same ones in every phase.
    """
    by_group = np.lexsort((rows, groups))
    sorted_groups = groups[by_group]
    starts = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
    sizes = np.diff(np.r_[starts, len(sorted_groups)])
    rank = np.arange(len(sorted_groups)) - np.repeat(starts, sizes)
    return by_group[np.lexsort((sorted_groups, rank))]


def blend(counts: Sequence[int], weights: Sequence[float], budget: int | None) -> np.ndarray:
    """Rows of several sources in proportion to `weights`: [N, 2] (source, number among its rows).

    N is `budget`; without one, as many rows as possible without repetition. A source with too few rows starts again
    from its first. The sources alternate, so that any part of the result has nearly the same proportions.
    """
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    size = budget if budget is not None else int(min(n / share for n, share in zip(counts, shares, strict=True)) + 1e-9)
    exact = shares * size
    row_counts = np.floor(exact).astype(np.int64)
    for i in np.argsort(row_counts - exact, kind="stable")[: size - row_counts.sum()]:
        row_counts[i] += 1
    parts = [
        np.stack(
            [
                np.full(row_count, i),
                np.arange(row_count) % max(1, n),
                (2 * np.arange(row_count) + 1) * (size / max(1, row_count)),
            ]
        )
        for i, (row_count, n) in enumerate(zip(row_counts, counts, strict=True))
    ]
    merged = np.concatenate(parts, axis=1)
    return merged[:2, np.argsort(merged[2], kind="stable")].T.astype(np.int64)
