"""How well scores order pairs: numbers by hand."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.maths import preferences
from rlhf.maths.intervals import win_rate_interval


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ELEMENTS = torch.tensor([4, 4, 4, 7, 9, 9])
"""a list of three pairs, a pair, a list of two pairs"""
GAPS = column(1.0, 2.0, -1.0, 0.0, 3.0, 0.5)


def test_accuracy_weighs_a_list_as_one_pair() -> None:
    shares = column(2 / 3, 1 / 2, 1.0)
    assert preferences.accuracy(GAPS, ELEMENTS) == win_rate_interval(shares)
    assert preferences.by_element(GAPS, ELEMENTS).tolist() == pytest.approx([2 / 3, 0.0, 1.75])


def test_a_list_is_right_if_all_its_pairs_are() -> None:
    """Lists 4 and 9; element 7 is no list. With a tie at the top, a random choice among the two best is right half the
    time; a tie beside a wrong pair is wrong."""
    lists = preferences.list_accuracy(GAPS, ELEMENTS)
    assert lists is not None and lists.mean == 0.5
    best_of_4 = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    gaps = column(1, 1, 1, 0, 1, 1, 0, 0, 2, 0, 1, -1)
    lists = preferences.list_accuracy(gaps, best_of_4)
    assert lists is not None and lists.mean == pytest.approx((1 + 1 / 2 + 1 / 3 + 0) / 4)
    assert preferences.list_accuracy(gaps[:2], torch.tensor([0, 1])) is None


def test_calibration_by_hand() -> None:
    """Gaps of log 3, that is of 3/4, of which two thirds are right; and one of log 9, that is of 9/10, which is."""
    gaps = column(math.log(3), math.log(3), -math.log(3), math.log(9))
    assert preferences.calibration_error(gaps) == pytest.approx((3 * (0.75 - 2 / 3) + 0.1) / 4)


def test_pairs_that_follow_bradley_terry_are_calibrated() -> None:
    """20,000 pairs whose labels are drawn with P = sigmoid(gap). Scores that are twice as sure are not."""
    draw = torch.Generator().manual_seed(0)
    gaps = 2 * torch.randn(20_000, generator=draw, dtype=torch.float64)
    signs = 2.0 * (torch.rand(20_000, generator=draw, dtype=torch.float64) < torch.sigmoid(gaps)) - 1
    sure = preferences.calibration_error(2 * signs * gaps)
    assert sure > 0.05 > 4 * preferences.calibration_error(signs * gaps)


def test_how_often_two_models_agree() -> None:
    gaps = torch.stack([column(1, -1, 2, 0), column(3, 1, -1, 0), column(-100, -100, 300, 0)])
    agreement = preferences.agreement(gaps)
    assert agreement[0].tolist() == [(3 + 0.5) / 4, (1 + 0.5) / 4, (2 + 0.5) / 4]
    assert torch.equal(agreement, agreement.T)


def test_position_bias_by_hand() -> None:
    """Six pairs: one for each response in both orders, two for the first place, one for the second, one half a tie and
    one without a verdict."""
    nan = -math.inf
    verdicts = [[1, 1], [0, 0], [0, 1], [0, 1], [1, 0], [0.5, 1], [nan, 0]]
    # For the first place: one of two, one of two, 2 x two of two, none of two, one of one, none of one.
    assert preferences.position_bias(torch.tensor(verdicts)) == {"first_place": 7 / 12, "flipped": 3 / 5}
    assert preferences.position_bias(torch.tensor([[0.5, 1.0], [nan, 0.0]])) == {}
