"""Collation of items into tensors, and the division of batches among ranks.

Masks are made here, from lengths, never from ids.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from data.prepare.encode import Demonstration, Preference, Prompt, Spans
from rlhf.errors import UserError
from rlhf.maths.uniforms import ORDER, stream
from rlhf.types import JoinedPairs, Pairs, Prompts, Sequences, WeightedSequences

SORTED_BATCHES = 50
"""number of batches whose rows are sorted by length together"""
NEAR_BATCHES = 4
"""number of batches of pairs with nearly the same longer side, sorted by the shorter side"""


def sft_batch(items: Sequence[Demonstration], pad_id: int) -> WeightedSequences:
    """Right-padded [B, S]; the loss mask covers the items' spans, which include the EOS."""
    rows = _sequences([item.ids for item in items], [item.spans for item in items], pad_id)
    return WeightedSequences(*rows.tensors(), weight=torch.tensor([item.weight for item in items]))


def pair_batch(items: Sequence[Preference], pad_id: int, weights: np.ndarray | None = None) -> Pairs:
    """Right-padded pairs; the loss masks cover the responses. weights: [B]

    Each side is padded to its own longest row. `margin` is None if no item has one; otherwise a missing margin is 0.
    """
    margins = [item.margin for item in items]
    has_margin = any(margin is not None for margin in margins)
    return Pairs(
        chosen=_sequences([i.chosen for i in items], [((i.prompt_length, len(i.chosen)),) for i in items], pad_id),
        rejected=_sequences(
            [i.rejected for i in items], [((i.prompt_length, len(i.rejected)),) for i in items], pad_id
        ),
        margin=torch.tensor([margin or 0.0 for margin in margins]) if has_margin else None,
        weight=None if weights is None else torch.tensor(weights, dtype=torch.float32),
    )


def prompt_batch(items: Sequence[Prompt], pad_id: int) -> Prompts:
    """Left-padded [B, P]."""
    return Prompts.left_padded([item.ids for item in items], tuple(item.row for item in items), pad_id)


def padding_share(micros: Sequence[Sequences | JoinedPairs], packs: Callable[[Sequences | JoinedPairs], bool]) -> float:
    """The share of padding among the tokens that a model computes. packs: whether it computes rows without padding"""
    real = [int(micro.mask.sum()) for micro in micros]
    computed = (n if packs(micro) else micro.ids.numel() for micro, n in zip(micros, real, strict=True))
    return 1 - sum(real) / sum(computed)


def _sequences(rows: Sequence[Sequence[int]], spans: Sequence[Spans], pad_id: int) -> Sequences:
    size = max(len(row) for row in rows)
    ids = torch.full((len(rows), size), pad_id)
    mask = torch.zeros(len(rows), size, dtype=torch.bool)
    loss_mask = torch.zeros_like(mask)
    for b, (row, loss_spans) in enumerate(zip(rows, spans, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        mask[b, : len(row)] = True
        for start, end in loss_spans:
            assert 1 <= start < end <= len(row), f"row {b}: learns [{start}, {end}) of {len(row)} tokens"
            loss_mask[b, start:end] = True
    return Sequences(ids=ids, mask=mask, loss_mask=loss_mask)


def counted_rows(rows: Sequence[int]) -> np.ndarray:
    """Which of a rank's rows of a batch count, bool [B]: all but a repeated last row and -1, see `Batches`."""
    return np.diff(rows, prepend=-1) != 0


class Batches:
    """The rows of each batch, in a new order every epoch. Iteration can resume at any batch.

    A batch consists of elements. An element is one row, or the rows of all pairs of one ranked list (InstructGPT, arXiv
    2203.02155, section 3.5). The batches of an epoch depend only on (seed, epoch) and the lengths. A batch has
    `batch_size` elements; or as many as have at most `batch_tokens` tokens together, and then up to one more per
    further rank. Elements that fill no batch are a smaller one at the end of the epoch; or (`drop_last`) they are left
    out, and each epoch leaves out others.

    The rows of a batch are divided among the ranks. All ranks get the same number of batches, and of rows per batch: a
    rank may get its last row twice, and the second one does not count; a rank for which there is no row gets -1, the
    last row of the data, which does not count either. The position is a number of elements, so it stays valid if the
    number of ranks changes.

    With lengths, the elements of SORTED_BATCHES batches are sorted together, and the batches are then shuffled. So a
    batch has rows of similar length and little padding.
    Raises: UserError if the batch does not divide by the ranks, or there are fewer elements than one batch.
    """

    def __init__(
        self,
        rows: int | np.ndarray,
        batch_size: int,
        seed: int = 0,
        ranks: tuple[int, int] = (0, 1),
        batch_tokens: int | None = None,
        elements: np.ndarray | None = None,
        drop_last: bool = True,
    ) -> None:
        """rows: their number; or the tokens of each [N], or of its longer and shorter side [N, 2].

        ranks: (rank, number of ranks). elements: the element of each row [N], numbered from 0 without gaps; None: each
        row is its own element.
        """
        count = rows if isinstance(rows, int) else len(rows)
        numbers = np.arange(count) if elements is None else np.asarray(elements)
        sizes = np.bincount(numbers)
        self.size = len(sizes)
        self._rows, self._ends = np.argsort(numbers, kind="stable"), np.cumsum(sizes)
        self.lengths = self.sides = self.tokens = None
        if not isinstance(rows, int):
            sides = np.asarray(rows).reshape(count, -1)
            sums = np.add.reduceat(sides[self._rows], self._ends - sizes) if count else sides
            self.lengths, self.sides, self.tokens = sides[:, 0], sums / sizes[:, None], sums.sum(1)
        self.batch_size, self.batch_tokens, self.seed, self.drop_last = batch_size, batch_tokens, seed, drop_last
        self.rank, self.world_size = ranks
        self.epoch, self.position = 0, 0
        self._require_whole_batches()

    def _require_whole_batches(self) -> None:
        ranks, ungrouped = self.world_size, self.size == len(self._rows)
        if self.batch_tokens is not None:
            assert self.tokens is not None, "a budget of tokens needs lengths"
            minimum = int(np.sort(self.tokens)[-ranks:].sum())
            if self.batch_tokens < minimum or self.size < ranks:
                raise UserError(
                    f"--batch-tokens {self.batch_tokens}: expected at least {minimum}, the longest "
                    f"{'row' if ungrouped else 'ranked list'} for each of {ranks} ranks, and {ranks} rows"
                )
            return
        if self.batch_size < 1 or self.batch_size % ranks:
            raise UserError(
                f"batch_size: got {self.batch_size}, expected a multiple of the {ranks} ranks; "
                f"try {max(1, round(self.batch_size / ranks)) * ranks}"
            )
        if self.size < self.batch_size:
            unit = "rows" if ungrouped else "prompts with ranked responses"
            raise UserError(
                f"got {self.size} {unit}, expected at least one batch of {self.batch_size}; "
                "lower batch_size or add rows"
            )

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and the number of its elements that were used."""
        return {"epoch": self.epoch, "row": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["row"]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's rows of each batch from the position to the end of the epoch; then the next epoch begins."""
        order, ends = self._epoch_order()
        while (end := self._end(ends, self.position)) > self.position:
            batch = order[self.position : end]
            self.position = end
            yield self._rank_rows(batch)
        self.set_epoch(self.epoch + 1)

    def until_epoch(self, epochs: int) -> Iterator[list[int]]:
        """The batches from the position to the end of epoch number `epochs`."""
        while self.epoch < epochs:
            yield from self

    def steps(self, epochs: int) -> int:
        """The number of batches in the first `epochs` epochs."""
        if self.batch_tokens is None:
            return epochs * (self.size // self.batch_size + (not self.drop_last and self.size % self.batch_size > 0))
        batches = copy.copy(self)
        batches.set_epoch(0)
        return sum(1 for _ in batches.until_epoch(epochs))

    def _end(self, ends: np.ndarray, start: int) -> int:
        """The end of the batch that begins at `start`; `start` if no batch is left.

        The batch is rounded up to equally many rows per rank, with the first rows of the next batch if there is one.
        """
        later_ends = ends[np.searchsorted(ends, start, side="right") :]
        if not len(later_ends):
            return start
        ranks, left = self.world_size, self.size - start
        rows = -(-(int(later_ends[0]) - start) // ranks) * ranks
        return start + min(rows, left // ranks * ranks if self.drop_last else left)

    def _rank_rows(self, batch: np.ndarray) -> list[int]:
        """This rank's rows of the elements of `batch`."""
        starts = np.r_[0, self._ends]
        rows = np.concatenate([self._rows[starts[element] : starts[element + 1]] for element in batch])
        if self.lengths is not None:  # all ranks get equally many long rows
            rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
        own = [int(row) for row in rows[self.rank :: self.world_size]]
        return own if len(own) * self.world_size >= len(rows) else [*own, own[-1] if own else -1]

    def _epoch_order(self) -> tuple[np.ndarray, np.ndarray]:
        """(the elements of this epoch in order, the end of each batch)."""
        random = stream(ORDER, self.seed, self.epoch)
        order = random.permutation(self.size)
        rows, used = self.batch_size, self.size // self.batch_size * self.batch_size
        if self.batch_tokens is not None and self.tokens is not None:
            rows, used = max(1, int(self.batch_tokens / self.tokens.mean())), self.size
        # The smaller last batch is drawn at random: the longest rows of a sorted stretch would weigh more than others.
        last = [] if self.drop_last or used == self.size else [order[used:]]
        if self.tokens is None:
            whole = np.arange(self.batch_size, used + 1, self.batch_size)
            return order, np.append(whole, self.size) if last else whole
        batches: list[np.ndarray] = []
        for start in range(0, used, SORTED_BATCHES * rows):
            stretch = order[start : min(start + SORTED_BATCHES * rows, used)]
            batches += self._split(self._sort(stretch, rows))
        batches = [*(batches[i] for i in random.permutation(len(batches))), *last]
        return np.concatenate(batches), np.cumsum([len(batch) for batch in batches])

    def _sort(self, stretch: np.ndarray, size: int) -> np.ndarray:
        """Sorted by length; pairs also by the shorter side in NEAR_BATCHES batches: 6 % padding on HH, not 12 %."""
        assert self.sides is not None
        longer, shorter = self.sides[stretch, 0], self.sides[stretch, -1]
        rank = np.empty(len(stretch), dtype=np.int64)
        rank[np.argsort(longer, kind="stable")] = np.arange(len(stretch))
        return stretch[np.lexsort((rank, shorter, rank // (NEAR_BATCHES * size)))]

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        """Batches of `batch_size` elements; or of at most `batch_tokens` tokens, as few as possible and of nearly equal
        size, because the gradient of a small batch is noisy."""
        if self.batch_tokens is None or self.tokens is None:
            return [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        lengths = self.tokens[rows]
        equal_size = -(-lengths.sum() // -(-lengths.sum() // self.batch_tokens))
        budget = min(self.batch_tokens, int(equal_size + lengths.max()))
        totals, edges = np.concatenate([[0], np.cumsum(lengths)]), [0]
        while edges[-1] < len(rows):
            edges.append(int(np.searchsorted(totals, totals[edges[-1]] + budget, side="right")) - 1)
        return [rows[start:end] for start, end in pairwise(edges)]
