"""Items become tensors, and batches are dealt out to ranks. The masks are born here, from lengths, never from ids."""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from data.build.encode import Demonstration, Preference, Prompt, Spans
from data.config import BatchOptions
from rlhf.errors import UserError
from rlhf.types import JoinedPairs, Pairs, Prompts, Sequences

SORTED = 50
"""batches whose rows are sorted by length together"""
NEAR = 4
"""batches of pairs with nearly the same longer side"""


def sft_batch(items: Sequence[Demonstration], pad_id: int) -> Sequences:
    """Right-padded [B, S]; the loss counts the tokens of the items' spans, an EOS included."""
    return _sequences([item.ids for item in items], [item.spans for item in items], pad_id)


def pair_batch(items: Sequence[Preference], pad_id: int, weights: np.ndarray | None = None) -> Pairs:
    """Both sides right-padded, each to its own longest; the loss masks are the responses. weights: [B]

    `margin` is None when no item has one; beside items that have one, an item without counts as margin 0.
    """
    margins = [item.margin for item in items]
    known = any(margin is not None for margin in margins)
    return Pairs(
        chosen=_sequences([i.chosen for i in items], [((i.prompt_length, len(i.chosen)),) for i in items], pad_id),
        rejected=_sequences(
            [i.rejected for i in items], [((i.prompt_length, len(i.rejected)),) for i in items], pad_id
        ),
        margin=torch.tensor([margin or 0.0 for margin in margins]) if known else None,
        weight=None if weights is None else torch.tensor(weights, dtype=torch.float32),
    )


def prompt_batch(items: Sequence[Prompt], pad_id: int) -> Prompts:
    """Left-padded [B, P], so that generation continues every row at the same column."""
    size = max(len(item.ids) for item in items)
    ids = torch.full((len(items), size), pad_id)
    mask = torch.zeros(len(items), size, dtype=torch.bool)
    for b, item in enumerate(items):
        ids[b, size - len(item.ids) :] = torch.tensor(item.ids)
        mask[b, size - len(item.ids) :] = True
    return Prompts(ids=ids, mask=mask, rows=tuple(item.row for item in items))


def padding(micros: Sequence[Sequences | JoinedPairs]) -> float:
    """The share of padding among the tokens that are computed."""
    real = sum(int(micro.mask.sum()) for micro in micros)
    return 1 - real / sum(micro.ids.numel() for micro in micros)


def _sequences(rows: Sequence[Sequence[int]], spans: Sequence[Spans], pad_id: int) -> Sequences:
    size = max(len(row) for row in rows)
    ids = torch.full((len(rows), size), pad_id)
    mask = torch.zeros(len(rows), size, dtype=torch.bool)
    loss_mask = torch.zeros_like(mask)
    for b, (row, learned) in enumerate(zip(rows, spans, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        mask[b, : len(row)] = True
        for start, end in learned:
            assert 1 <= start < end <= len(row), f"row {b}: learns [{start}, {end}) of {len(row)} tokens"
            loss_mask[b, start:end] = True
    return Sequences(ids=ids, mask=mask, loss_mask=loss_mask)


def counted(rows: Sequence[int]) -> np.ndarray:
    """Which of a rank's rows of a batch count: all but a last one that is there twice, see `Batches`. bool [B]"""
    return np.diff(rows, prepend=-1) != 0


class Batches:
    """Which rows each batch has: by length where lengths are given, another order every epoch, resumable anywhere.

    What is dealt out are elements: a row, or the rows that are the pairs of one ranked list (InstructGPT, arXiv
    2203.02155, section 3.5). An epoch's order and its batches depend on (seed, epoch) and the lengths alone: stretches
    of `batch_size` elements, or of as many as have at most `batch_tokens` tokens (and up to an element more for each
    rank but one). The rows of a batch are shared out to the ranks, so that every rank gets equally many batches, and
    equally many rows of each: some may get their last row twice, which then does not count. The position is a
    number of elements: it stays exact when the number of ranks changes. Elements that fill no batch at an epoch's end
    are left out (others each epoch).

    With lengths, elements are sorted within SORTED batches, which are then shuffled: a batch has rows of similar
    length, and little of it is padding.
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
    ) -> None:
        """`rows`: how many there are, or the tokens of each [N], or of its longer and its shorter side [N, 2].

        `ranks`: this one's number, and how many there are. `elements`: the number of each row's element [N], from 0
        without a gap; None: each row is its own.
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
        self.batch_size, self.batch_tokens, self.seed = batch_size, batch_tokens, seed
        self.rank, self.world_size = ranks
        self.epoch, self.row = 0, 0
        self._require_whole_batches()

    def _require_whole_batches(self) -> None:
        ranks, alone = self.world_size, self.size == len(self._rows)
        if self.batch_tokens is not None:
            assert self.tokens is not None, "a budget of tokens needs lengths"
            least = int(np.sort(self.tokens)[-ranks:].sum())
            if self.batch_tokens < least or self.size < ranks:
                raise UserError(
                    f"--batch-tokens {self.batch_tokens}: expected at least {least}, the longest "
                    f"{'row' if alone else 'ranked list'} for each of {ranks} ranks, and {ranks} rows"
                )
            return
        if self.batch_size < 1 or self.batch_size % ranks:
            raise UserError(
                f"batch_size: got {self.batch_size}, expected a multiple of the {ranks} ranks; "
                f"try {max(1, round(self.batch_size / ranks)) * ranks}"
            )
        if self.size < self.batch_size:
            unit = "rows" if alone else "prompts with ranked responses"
            raise UserError(
                f"got {self.size} {unit}, expected at least one batch of {self.batch_size}; "
                "lower batch_size or add rows"
            )

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.row = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and the elements of it that were dealt out."""
        return {"epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.row = state["epoch"], state["row"]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's rows of every batch from the position to the end of the epoch, and go to the next epoch."""
        order, ends = self._order()
        while (end := self._end(ends, self.row)) > self.row:
            batch = order[self.row : end]
            self.row = end
            yield self._share(batch)
        self.set_epoch(self.epoch + 1)

    def take(self, epochs: int) -> Iterator[list[int]]:
        """The batches up to the end of epoch number `epochs`."""
        while self.epoch < epochs:
            yield from self

    def steps(self, epochs: int) -> int:
        """How many batches `take` gives from the first epoch on."""
        if self.batch_tokens is None:
            return epochs * (self.size // self.batch_size)
        fresh = copy.copy(self)
        fresh.set_epoch(0)
        return sum(1 for _ in fresh.take(epochs))

    def _end(self, ends: np.ndarray, start: int) -> int:
        """Where the batch that begins at `start` ends; `start` if no whole batch is left.

        It is rounded up, so that every rank gets as many rows; the rows it takes are the next batch's first.
        """
        later = ends[np.searchsorted(ends, start, side="right") :]
        if not len(later):
            return start
        ranks = self.world_size
        rows = -(-(int(later[0]) - start) // ranks) * ranks
        return start + min(rows, (self.size - start) // ranks * ranks)

    def _share(self, batch: np.ndarray) -> list[int]:
        """This rank's rows of the elements of `batch`."""
        starts = np.r_[0, self._ends]
        rows = np.concatenate([self._rows[starts[element] : starts[element + 1]] for element in batch])
        if self.lengths is not None:  # every rank gets as many long rows as the others
            rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
        mine = [int(row) for row in rows[self.rank :: self.world_size]]
        return mine if len(mine) * self.world_size >= len(rows) else [*mine, mine[-1]]

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """The elements of this epoch, and where each batch ends."""
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(self.size)
        if self.tokens is None:
            return order, np.arange(self.batch_size, self.size + 1, self.batch_size)
        rows, whole = self.batch_size, self.size // self.batch_size * self.batch_size
        if self.batch_tokens is not None:
            rows, whole = max(1, int(self.batch_tokens / self.tokens.mean())), self.size
        batches: list[np.ndarray] = []
        for start in range(0, whole, SORTED * rows):
            stretch = order[start : min(start + SORTED * rows, whole)]
            batches += self._cut(self._sorted(stretch, rows))
        batches = [batches[i] for i in random.permutation(len(batches))]
        return np.concatenate([*batches, order[whole:]]), np.cumsum([len(batch) for batch in batches])

    def _sorted(self, stretch: np.ndarray, size: int) -> np.ndarray:
        """By length; of pairs, NEAR batches at a time by their shorter side: 12 % padding on HH becomes 6 %."""
        assert self.sides is not None
        longer, shorter = self.sides[stretch, 0], self.sides[stretch, -1]
        rank = np.empty(len(stretch), dtype=np.int64)
        rank[np.argsort(longer, kind="stable")] = np.arange(len(stretch))
        return stretch[np.lexsort((rank, shorter, rank // (NEAR * size)))]

    def _cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Batches of `batch_size`; or of at most `batch_tokens`, as few as can be and nearly equal, because a mean over
        few tokens would be a loud step."""
        if self.batch_tokens is None or self.tokens is None:
            return [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        lengths = self.tokens[rows]
        even = -(-lengths.sum() // -(-lengths.sum() // self.batch_tokens))
        budget = min(self.batch_tokens, int(even + lengths.max()))
        total, edges = np.concatenate([[0], np.cumsum(lengths)]), [0]
        while edges[-1] < len(rows):
            edges.append(int(np.searchsorted(total, total[edges[-1]] + budget, side="right")) - 1)
        return [rows[start:end] for start, end in pairwise(edges)]


def batches_of(
    sides: np.ndarray, options: BatchOptions, seed: int, ranks: tuple[int, int], elements: np.ndarray | None = None
) -> Batches:
    """The batches that the options ask for, of items with these lengths [N, k] and batch elements [N]."""
    rows = sides if options.group_by_length or options.batch_tokens else len(sides)
    return Batches(rows, options.batch_size, seed, ranks, options.batch_tokens, elements)
