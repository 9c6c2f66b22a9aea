"""Items become tensors, and batches are dealt out to ranks. The masks are born here, from lengths, never from ids."""

import random
from collections.abc import Iterator, Sequence

import torch

from data.dataset import Demonstration, Preference, Prompt
from rlhf.config import UserError
from rlhf.types import Pairs, Prompts, Sequences


def sft_batch(items: Sequence[Demonstration], pad_id: int) -> Sequences:
    """Right-padded [B, S]; the loss counts the response's tokens, its EOS included."""
    return _sequences([item.ids for item in items], [item.prompt_length for item in items], pad_id)


def pair_batch(items: Sequence[Preference], pad_id: int) -> Pairs:
    """Both sides right-padded, each to its own longest; the loss masks are the responses.

    `margin` is None when no item has one; beside items that have one, an item without counts as margin 0.
    """
    starts = [item.prompt_length for item in items]
    margins = [item.margin for item in items]
    known = any(margin is not None for margin in margins)
    return Pairs(
        chosen=_sequences([item.chosen for item in items], starts, pad_id),
        rejected=_sequences([item.rejected for item in items], starts, pad_id),
        margin=torch.tensor([margin or 0.0 for margin in margins]) if known else None,
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


def _sequences(rows: Sequence[Sequence[int]], starts: Sequence[int], pad_id: int) -> Sequences:
    size = max(len(row) for row in rows)
    ids = torch.full((len(rows), size), pad_id)
    mask = torch.zeros(len(rows), size, dtype=torch.bool)
    loss_mask = torch.zeros_like(mask)
    for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
        assert 1 <= start < len(row), f"row {b}: prompt of {start} tokens in a sequence of {len(row)}"
        ids[b, : len(row)] = torch.tensor(row)
        mask[b, : len(row)] = True
        loss_mask[b, start : len(row)] = True
    return Sequences(ids=ids, mask=mask, loss_mask=loss_mask)


def batch_indices(
    size: int, batch_size: int, seed: int, epochs: int, rank: int, world_size: int
) -> Iterator[list[int]]:
    """This rank's rows of every batch of `batch_size` rows, `epochs` times over `size` rows.

    Each epoch is shuffled by (seed, epoch). Every rank gets the same number of batches and of rows, and the union
    over ranks does not depend on their number. An epoch's incomplete last batch is left out.
    Raises: UserError if the batch does not divide by the ranks, or there are fewer rows than one batch.
    """
    if batch_size < 1 or batch_size % world_size:
        raise UserError(
            f"batch_size: got {batch_size}, expected a multiple of the {world_size} ranks; "
            f"try {max(1, round(batch_size / world_size)) * world_size}"
        )
    if size < batch_size:
        raise UserError(f"got {size} rows, expected at least one batch of {batch_size}; lower batch_size or add rows")
    return _batches(size, batch_size, seed, range(epochs), slice(rank, None, world_size))


def _batches(size: int, batch_size: int, seed: int, epochs: range, mine: slice) -> Iterator[list[int]]:
    for epoch in epochs:
        order = list(range(size))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        for start in range(0, size - batch_size + 1, batch_size):
            yield order[start : start + batch_size][mine]
