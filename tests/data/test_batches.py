"""Masks by hand, and how rows are dealt out to ranks."""

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch

from data.batches import Batches, counted_rows, padding_share, pair_batch, prompt_batch, sft_batch
from data.prepare.encode import Demonstration, Preference, Prompt
from rlhf.errors import UserError
from rlhf.types import Message, Row

PAD = 9


def test_sft_batch_by_hand() -> None:
    # The prompt's last token and an id equal to the padding's are real; only positions decide.
    batch = sft_batch(
        [Demonstration((1, 5, 6, 2), ((2, 4),)), Demonstration((1, PAD, 2, 7, 8, 2), ((1, 2), (3, 6)))], PAD
    )
    assert batch.ids.tolist() == [[1, 5, 6, 2, PAD, PAD], [1, PAD, 2, 7, 8, 2]]
    assert batch.ids.dtype == torch.long
    assert batch.mask.tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert batch.loss_mask.tolist() == [
        [False, False, True, True, False, False],
        [False, True, False, True, True, True],
    ]


def test_pair_batch_by_hand() -> None:
    pairs = pair_batch([Preference((1, 4, 2), (1, 5, 6, 2), 1), Preference((1, 3, 2), (1, 3, 7, 2), 2, 0.5)], PAD)
    assert pairs.chosen.ids.tolist() == [[1, 4, 2], [1, 3, 2]]
    assert pairs.rejected.ids.tolist() == [[1, 5, 6, 2], [1, 3, 7, 2]]
    assert pairs.chosen.loss_mask.tolist() == [[False, True, True], [False, False, True]]
    assert pairs.rejected.loss_mask.tolist() == [[False, True, True, True], [False, False, True, True]]
    assert pairs.margin is not None
    assert pairs.margin.tolist() == [0.0, 0.5]
    plain = pair_batch([Preference((1, 4, 2), (1, 5, 2), 1)], PAD)
    assert plain.margin is None


def test_prompt_batch_by_hand() -> None:
    rows = [Row((Message("user", text),)) for text in ("a", "b")]
    batch = prompt_batch([Prompt((1, 5), rows[0]), Prompt((1, PAD, PAD, 6), rows[1])], PAD)
    assert batch.ids.tolist() == [[PAD, PAD, 1, 5], [1, PAD, PAD, 6]]
    assert batch.mask.tolist() == [[False, False, True, True], [True] * 4]
    assert batch.rows == tuple(rows)


def test_a_sequence_without_prompt_or_response_is_our_mistake() -> None:
    for span in ((0, 3), (3, 3), (2, 4)):
        with pytest.raises(AssertionError):
            sft_batch([Demonstration((1, 4, 2), (span,))], PAD)


def dealt(rows: int | np.ndarray, size: int, epochs: int, ranks: int = 1, **more: Any) -> list[list[list[int]]]:
    """[rank][batch] rows."""
    return [list(Batches(rows, size, ranks=(rank, ranks), **more).until_epoch(epochs)) for rank in range(ranks)]


LENGTHS = np.random.default_rng(3).lognormal(4.5, 0.8, 1000).astype(int).clip(2, 512)  # as dialogues are


@pytest.mark.parametrize("rows", [19, LENGTHS[:19]], ids=["any", "by length"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_batches_of_one_rank(rows: Any, ranks: int) -> None:
    [whole] = dealt(rows, 4, 3, seed=7)
    shares = dealt(rows, 4, 3, ranks, seed=7)
    assert {len(batches) for batches in shares} == {len(whole)} == {12}  # 19 // 4 batches, 3 times
    assert Batches(rows, 4).steps(3) == 12
    for b, batch in enumerate(whole):
        together = [shares[rank][b] for rank in range(ranks)]
        assert {len(part) for part in together} == {4 // ranks}
        assert sorted(chain(*together)) == sorted(batch)


@pytest.mark.parametrize("rows", [12, LENGTHS[:12]], ids=["any", "by length"])
def test_an_epoch_sees_a_row_once_and_each_epoch_another_order(rows: Any) -> None:
    [batches] = dealt(rows, 3, 2, seed=1)
    first, second = list(chain(*batches[:4])), list(chain(*batches[4:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert [batches] == dealt(rows, 3, 2, seed=1)
    assert [batches] != dealt(rows, 3, 2, seed=2)
    later = Batches(rows, 3, seed=1)
    later.set_epoch(1)
    assert list(later) == batches[4:]


def test_rows_left_out_of_an_epoch_are_others_in_the_next() -> None:
    batches = Batches(LENGTHS[:103], 20, seed=0)
    left_out = [set(range(103)) - set(chain(*batches)) for _ in range(4)]
    assert [len(rows) for rows in left_out] == [3] * 4
    assert len(set.union(*left_out)) > 9


@pytest.mark.parametrize("more", [{}, {"elements": np.repeat(np.arange(54), 2)[:107]}], ids=["rows", "lists"])
@pytest.mark.parametrize("rows", [107, LENGTHS[:107]], ids=["any", "by length"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_row_is_trained_on_in_a_smaller_last_batch(ranks: int, rows: Any, more: dict[str, Any]) -> None:
    """107 rows in batches of 8: the last has 3 rows, fewer than ranks. Or 54 lists, one with a single row."""
    shares = dealt(rows, 8, 2, ranks, seed=3, drop_last=False, **more)
    size = 107 if not more else 54
    assert {len(batches) for batches in shares} == {Batches(rows, 8, drop_last=False, **more).steps(2)}
    assert len(shares[0]) == 2 * (size // 8 + 1)
    counted = []
    for parts in zip(*shares, strict=True):
        assert len({len(part) for part in parts}) == 1
        counts = [counted_rows(part) for part in parts]
        assert {-1} >= {row for part in parts for row in part if row < 0}
        counted.append(sorted(row for part, c in zip(parts, counts, strict=True) for row in np.array(part)[c].tolist()))
    assert counted == [sorted(batch) for batch in dealt(rows, 8, 2, seed=3, drop_last=False, **more)[0]]
    for epoch in (counted[: len(counted) // 2], counted[len(counted) // 2 :]):
        assert sorted(chain(*epoch)) == [*range(107)]
    whole = dealt(rows, 8, 1, ranks, seed=3, **more)  # the others are those of before
    assert [batches[: size // 8] for batches in shares] == whole
    resumed = Batches(rows, 8, 3, (0, ranks), drop_last=False, **more)
    resumed.load_state_dict({"epoch": 0, "row": size // 8 * 8})
    assert list(resumed.until_epoch(2)) == shares[0][size // 8 :]


def test_which_rows_are_in_the_smaller_batch_does_not_depend_on_their_length() -> None:
    """Sorted, they would be the longest, and weigh more than the others in every epoch."""
    last = Batches(np.sort(LENGTHS[:107]), 8, drop_last=False)
    rows = [list(last)[-1] for _ in range(40)]
    assert {len(batch) for batch in rows} == {3}
    assert 107 / 2 - 4 * 107 / np.sqrt(12 * 120) < np.mean(rows) < 107 / 2 + 4 * 107 / np.sqrt(12 * 120)  # four sigma


def test_the_rows_that_a_budget_of_tokens_leaves_at_the_end_of_an_epoch() -> None:
    shares = dealt(LENGTHS[:10], 1, 1, 3, batch_tokens=4096, drop_last=False)
    parts = [np.array(part)[counted_rows(part)].tolist() for batches in shares for part in batches]
    assert sorted(chain(*parts)) == [*range(10)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_budget_of_tokens(ranks: int) -> None:
    shares = dealt(LENGTHS, 1, 2, ranks, batch_tokens=4096)
    begun = Batches(LENGTHS, 1, ranks=(0, ranks), batch_tokens=4096)
    assert [next(begun.until_epoch(2)) for _ in range(2)] == shares[0][:2]
    assert {len(batches) for batches in shares} == {begun.steps(2)}  # from the first epoch on, wherever it stands
    batches = [list(chain(*parts)) for parts in zip(*shares, strict=True)]
    counts = np.bincount(list(chain(*batches)), minlength=len(LENGTHS))
    assert set(counts) <= {1, 2}  # twice in two epochs, but for fewer rows than ranks at the end of each
    assert (counts == 1).sum() <= 2 * (ranks - 1)
    for b, batch in enumerate(batches):
        assert LENGTHS[batch].sum() <= 4096 + (ranks - 1) * LENGTHS.max()
        assert len({len(shares[rank][b]) for rank in range(ranks)}) == 1
    full = np.array([LENGTHS[batch].sum() for batch in batches])
    assert np.median(full) > 0.85 * 4096
    assert (full < 4096 / 3).sum() <= 2 * ranks, "small batches but for the ends of the epochs"


@pytest.mark.parametrize(
    ("rows", "batches"),
    [
        ([[10, 6], [10, 4], [9, 9], [8, 8]], [16, 14, 18, 16]),  # both sides in full: no two in 20 tokens
        ([[9], [11], [12], [8]], [17, 11, 12]),  # rows with the prompt once
        ([[5], [5], [11]], [10, 11]),  # one token too many for one batch
    ],
    ids=["both sides", "one row", "one token more"],
)
def test_a_budget_of_tokens_counts_all_that_is_computed_of_a_pair(rows: list[list[int]], batches: list[int]) -> None:
    sides = np.array(rows)
    result = [int(sides[batch].sum()) for batch in Batches(sides, 1, batch_tokens=20)]
    assert sorted(result) == sorted(batches)
    with pytest.raises(UserError, match=f"--batch-tokens 7: expected at least {sides.sum(1).max()}, the longest row"):
        Batches(sides, 1, batch_tokens=7)


def test_pairs_are_near_in_both_sides() -> None:
    """Two passes over each micro-batch's sides, the longer half first, as the reward model makes them."""
    random = np.random.default_rng(1)
    answers = random.lognormal(3.8, 0.9, (2, len(LENGTHS))).astype(int).clip(1, 300)
    sides = np.sort(LENGTHS + answers, axis=0)[::-1].T
    batches = list(Batches(sides, 16))
    assert sorted(row for batch in batches for row in batch) == sorted(set(chain(*batches)))
    shares = []
    for rows in (sides, sides[:, 0]):
        real = computed = 0
        for batch in Batches(rows, 16):
            for micro in (batch[:8], batch[8:]):
                lengths = np.sort(sides[micro], axis=None)[::-1]
                real += lengths.sum()
                computed += 8 * (lengths[0] + lengths[8])
        shares.append(1 - real / computed)
    assert shares[0] < 0.1 < shares[1]


def test_padding_by_hand() -> None:
    batch = sft_batch([Demonstration((1, 5, 6, 2), ((2, 4),)), Demonstration((1, 2), ((1, 2),))], PAD)
    assert padding_share([batch], lambda _: False) == 1 - 6 / 8
    packed = iter([True, False])
    assert padding_share([batch, batch], lambda _: next(packed)) == 1 - 12 / 14


@pytest.mark.parametrize("more", [{}, {"batch_tokens": 3000}], ids=["rows", "tokens"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 4), (4, 2)])
def test_a_position_is_resumed_exactly_with_any_number_of_ranks(before: int, after: int, more: dict[str, Any]) -> None:
    """Stop after every number of steps in two epochs: what is left is what was not seen, none twice."""
    whole = dealt(LENGTHS[:200], 8, 2, before, seed=5, **more)
    steps = len(whole[0])
    for stop in range(0, steps, 7):
        ranks = [Batches(LENGTHS[:200], 8, 5, (rank, before), **more) for rank in range(before)]
        first = [list(islice(batches.until_epoch(2), stop)) for batches in ranks]
        assert first == [batches[:stop] for batches in whole]
        states = [batches.state_dict() for batches in ranks]
        assert all(state == states[0] for state in states)
        rest = []
        for rank in range(after):
            resumed = Batches(LENGTHS[:200], 8, 5, (rank, after), **more)
            resumed.load_state_dict(states[0])
            rest.append(list(resumed.until_epoch(2)))
        if before == after:
            assert rest == [batches[stop:] for batches in whole]
        else:
            row_ids = [row for batches in (*first, *rest) for batch in batches for row in batch]
            counts = np.bincount(row_ids, minlength=200)
            assert counts.max() <= 2
            assert (counts == 2).sum() >= 200 - 2 * (after + before)
            assert more or (counts == 2).all()


ELEMENTS = np.repeat(np.arange(60), np.random.default_rng(2).integers(1, 7, 60))
"""the element of each row: 60 lists of 1 to 6 pairs"""


@pytest.mark.parametrize("more", [{}, {"batch_tokens": 6000}], ids=["rows", "tokens"])
@pytest.mark.parametrize("lengths", [LENGTHS[: len(ELEMENTS)], None], ids=["by length", "any"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_one_element_are_in_one_batch(ranks: int, lengths: Any, more: dict[str, Any]) -> None:
    """Whatever the ranks, which get equally many rows; none counts twice; a run that was stopped goes on after them."""
    moved = np.random.default_rng(4).permutation(ELEMENTS)  # rows of an element are not neighbours
    rows = len(moved) if lengths is None and not more else LENGTHS[: len(moved)]
    shares = dealt(rows, 8, 2, ranks, elements=moved, seed=3, **more)
    assert len(shares[0]) == Batches(rows, 8, ranks=(0, ranks), elements=moved, seed=3, **more).steps(2)
    steps = []
    for parts in zip(*shares, strict=True):
        assert len({len(part) for part in parts}) == 1
        if not isinstance(rows, int):  # the longest first, so that ranks have as much to do, and a spare row is short
            assert all(LENGTHS[part].tolist() == sorted(LENGTHS[part], reverse=True) for part in parts)
        steps.append(
            sorted(row for part in parts for row, counts in zip(part, counted_rows(part), strict=True) if counts)
        )
        elements = {moved[row] for row in steps[-1]}
        assert steps[-1] == np.flatnonzero(np.isin(moved, list(elements))).tolist()
        assert more or len(elements) == 8
        assert not more or LENGTHS[steps[-1]].sum() < 6000 + (ranks - 1) * 6 * 512
    first = [row for step in steps[: len(steps) // 2] for row in step]
    assert len(first) == len(set(first)) > 0.8 * len(moved)
    if not more:
        assert steps == [sorted(step) for step in dealt(rows, 8, 2, elements=moved, seed=3)[0]]
    resumed = Batches(rows, 8, 3, (0, ranks), elements=moved, **more)
    resumed.load_state_dict({"epoch": 0, "row": len({moved[row] for step in steps[:3] for row in step})})
    assert list(resumed.until_epoch(2)) == shares[0][3:]


def test_elements_of_rows_of_similar_length_are_together_however_many_they_have() -> None:
    """16 lists of six rows of 10 tokens, and 16 rows of 60: equally many tokens each."""
    lengths, elements = np.array([10] * 96 + [60] * 16), np.r_[np.repeat(np.arange(16), 6), np.arange(16, 32)]
    assert [len(set(lengths[batch])) for batch in Batches(lengths, 8, elements=elements)] == [1] * 4


def test_rows_of_equal_length_stay_in_order() -> None:
    """A sort that is not stable may give other ranks, on other CPUs, another order: rows lost and rows twice."""
    assert dealt(np.full(96, 5), 96, 2, ranks=2) == dealt(96, 96, 2, ranks=2)
    lengths, [order] = 5 + np.arange(96) % 2, Batches(96, 96)
    assert list(Batches(lengths, 96)) == [sorted(order, key=lambda row: -lengths[row])]
    assert dealt(96, 1, 1, elements=np.zeros(96, dtype=int)) == [[list(range(96))]]


def test_the_elements_of_rows_of_their_own_change_nothing() -> None:
    for rows in (LENGTHS, np.stack([LENGTHS, LENGTHS // 2], axis=1), len(LENGTHS)):
        assert dealt(rows, 16, 1, 2, elements=np.arange(len(LENGTHS))) == dealt(rows, 16, 1, 2)


def test_impossible_batches_are_refused_before_the_first_one() -> None:
    with pytest.raises(UserError, match=r"got 6, expected a multiple of the 4 ranks; try 8"):
        Batches(100, 6, ranks=(0, 4))
    with pytest.raises(UserError, match="got 3 rows, expected at least one batch of 8"):
        Batches(3, 8, ranks=(0, 2))
    with pytest.raises(UserError, match="got 2 prompts with ranked responses, expected at least one batch of 3"):
        Batches(5, 3, elements=np.array([0, 0, 1, 1, 1]))
    with pytest.raises(UserError, match="--batch-tokens 30: expected at least 37, the longest row for each of 2 ranks"):
        Batches(np.array([20, 3, 17, 9]), 1, ranks=(0, 2), batch_tokens=30)
    with pytest.raises(UserError, match=r"--batch-tokens 99: expected at least 20, .* and 3 rows"):
        Batches(np.array([20]), 1, ranks=(0, 3), batch_tokens=99)
    assert [len(batch) for batch in Batches(np.array([20, 17]), 1, ranks=(0, 2), batch_tokens=37)] == [1]
