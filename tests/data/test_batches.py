"""Masks by hand, and how rows are dealt out to ranks."""

from itertools import chain

import pytest
import torch

from data.batches import batch_indices, pair_batch, prompt_batch, sft_batch
from data.dataset import Demonstration, Preference, Prompt
from rlhf.config import UserError
from rlhf.types import Message, Row

PAD = 9


def test_sft_batch_by_hand() -> None:
    # The prompt's last token and an id equal to the padding's are real; only positions decide.
    batch = sft_batch([Demonstration((1, 5, 6, 2), 2), Demonstration((1, PAD, 2, 7, 8, 2), 3)], PAD)
    assert batch.ids.tolist() == [[1, 5, 6, 2, PAD, PAD], [1, PAD, 2, 7, 8, 2]]
    assert batch.ids.dtype == torch.long
    assert batch.mask.tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert batch.loss_mask.tolist() == [
        [False, False, True, True, False, False],
        [False, False, False, True, True, True],
    ]


def test_pair_batch_by_hand() -> None:
    pairs = pair_batch([Preference((1, 4, 2), (1, 5, 6, 2), 1), Preference((1, 3, 2), (1, 3, 7, 2), 2, 0.5)], PAD)
    assert pairs.chosen.ids.tolist() == [[1, 4, 2], [1, 3, 2]]
    assert pairs.rejected.ids.tolist() == [[1, 5, 6, 2], [1, 3, 7, 2]]
    assert pairs.chosen.loss_mask.tolist() == [[False, True, True], [False, False, True]]
    assert pairs.rejected.loss_mask.tolist() == [[False, True, True, True], [False, False, True, True]]
    assert pairs.margin is not None
    assert pairs.margin.tolist() == [0.0, 0.5]
    assert pair_batch([Preference((1, 4, 2), (1, 5, 2), 1)], PAD).margin is None


def test_prompt_batch_by_hand() -> None:
    rows = [Row((Message("user", text),)) for text in ("a", "b")]
    batch = prompt_batch([Prompt((1, 5), rows[0]), Prompt((1, PAD, PAD, 6), rows[1])], PAD)
    assert batch.ids.tolist() == [[PAD, PAD, 1, 5], [1, PAD, PAD, 6]]
    assert batch.mask.tolist() == [[False, False, True, True], [True] * 4]
    assert batch.rows == tuple(rows)


def test_a_sequence_without_prompt_or_response_is_our_mistake() -> None:
    for start in (0, 3):
        with pytest.raises(AssertionError):
            sft_batch([Demonstration((1, 4, 2), start)], PAD)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_batches_of_one_rank(world_size: int) -> None:
    whole = list(batch_indices(19, 4, seed=7, epochs=3, rank=0, world_size=1))
    ranks = [list(batch_indices(19, 4, 7, 3, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(whole)} == {12}  # 19 // 4 batches, 3 times
    for b, batch in enumerate(whole):
        dealt = [ranks[rank][b] for rank in range(world_size)]
        assert {len(rows) for rows in dealt} == {4 // world_size}
        assert sorted(chain(*dealt)) == sorted(batch)


def test_an_epoch_sees_a_row_once_and_each_epoch_another_order() -> None:
    batches = list(batch_indices(12, 3, seed=1, epochs=2, rank=0, world_size=1))
    first, second = list(chain(*batches[:4])), list(chain(*batches[4:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert batches == list(batch_indices(12, 3, seed=1, epochs=2, rank=0, world_size=1))
    assert batches != list(batch_indices(12, 3, seed=2, epochs=2, rank=0, world_size=1))


def test_impossible_batches_are_refused_before_the_first_one() -> None:
    with pytest.raises(UserError, match=r"got 6, expected a multiple of the 4 ranks; try 8"):
        batch_indices(100, 6, 0, 1, 0, 4)
    with pytest.raises(UserError, match="got 3 rows, expected at least one batch of 8"):
        batch_indices(3, 8, 0, 1, 0, 2)
