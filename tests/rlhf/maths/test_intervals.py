"""Intervals against tables, by hand, and by how often they cover a truth that is known."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.maths.intervals import (
    log_odds_change,
    mean_interval,
    pair_wins,
    power,
    ratio_interval,
    student_t,
    win_rate_interval,
)


def test_students_t_is_that_of_the_tables() -> None:
    exact = {1: 12.70620474, 2: 4.30265273}
    for freedom, expected in exact.items():
        assert student_t(freedom) == pytest.approx(expected, rel=1e-8)
    for freedom, expected in {3: 3.182, 5: 2.571, 9: 2.262, 30: 2.042, 10**9: 1.960}.items():
        assert student_t(freedom) == pytest.approx(expected, rel=3e-3 if freedom < 5 else 3e-4)


def test_students_t_is_expanded_to_the_fourth_power() -> None:
    """What is left out is c5 / n^5 + c6 / n^6 + ..: from 30 and 100 degrees follows 10. A coefficient that is off by
    one moves the sum by 4e-3 and more; the next terms by 4e-4, rounding by 1e-5."""
    exact = {10: 2.22813885198627475, 30: 2.04227245630123831, 100: 1.98397151852355229}
    left = {freedom: (value - student_t(freedom)) * freedom**5 for freedom, value in exact.items()}
    slope = (left[30] - left[100]) / (1 / 30 - 1 / 100)
    assert left[10] == pytest.approx(left[30] + slope * (1 / 10 - 1 / 30), abs=1e-3)


@pytest.mark.parametrize("freedom", [1, 2, 19, 49])
@pytest.mark.parametrize("together", [1, 4, 10])
def test_the_tail_beyond_students_t_is_divided_among_the_intervals(freedom: int, together: int) -> None:
    """The tail by 5,000 steps of the midpoint rule over atan(t), which is off by 1e-6 of it at most here."""
    first = math.atan(student_t(freedom, together))
    step = (math.pi / 2 - first) / 5000
    points = [math.tan(first + (i + 0.5) * step) for i in range(5000)]
    density = sum((1 + x * x / freedom) ** (-(freedom + 1) / 2) * (1 + x * x) for x in points)
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    assert factor * step * density == pytest.approx(0.025 / together, rel=3e-5)


def test_the_interval_of_a_mean_by_hand() -> None:
    interval = mean_interval(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    half = 2.571 * math.sqrt(3.5) / math.sqrt(6)
    assert interval.mean == 3.5
    assert (interval.low, interval.high) == pytest.approx((3.5 - half, 3.5 + half), abs=1e-3)


def test_the_interval_of_a_win_rate_by_hand() -> None:
    interval = win_rate_interval(torch.tensor([1.0, 1.0, 0.5, 0.0]))
    values = [1, 1, 0.5, 0, 0, 1]
    center = sum(values) / 6
    half = 2.571 * math.sqrt(sum((v - center) ** 2 for v in values) / 5 / 6)
    assert interval.mean == 0.625
    assert (interval.low, interval.high) == pytest.approx((center - half, min(1.0, center + half)), abs=1e-3)


def test_a_win_rate_never_has_an_interval_without_width_or_its_mean() -> None:
    for wins in ([1.0] * 30, [0.0] * 30, [0.5] * 30, [0.5] * 29 + [1.0], [1.0, 1.0]):
        interval = win_rate_interval(torch.tensor(wins))
        assert 0 <= interval.low <= interval.mean <= interval.high <= 1
        assert interval.high - interval.low > 0.02


def fractions(kind: str, shape: tuple[int, int], draw: torch.Generator) -> tuple[Tensor, float]:
    """Prompts' wins [repetitions, prompts] of a policy whose win rate is known, and that rate."""
    u = torch.rand(shape, generator=draw, dtype=torch.float64)
    if kind == "even":
        return (u < 0.5).double(), 0.5
    if kind == "nearly all":
        return (u < 0.95).double(), 0.95
    if kind == "mostly ties":
        return torch.where(u < 0.1, 1.0, torch.where(u < 0.15, 0.0, 0.5)).double(), 0.525
    assert kind == "two draws"  # two pairs a prompt, of prompts with different odds: uniform ones have the mean 1/2
    pairs = torch.rand((2, *shape), generator=draw, dtype=torch.float64)
    return (pairs < u).double().mean(0), 0.5


def test_a_win_rate_is_a_mean_in_float64() -> None:
    wins = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert win_rate_interval(wins).mean == pytest.approx(math.fsum(wins.tolist()) / 1000, rel=1e-13)


@pytest.mark.parametrize("prompts", [20, 400])
@pytest.mark.parametrize("kind", ["even", "nearly all", "mostly ties", "two draws"])
def test_the_win_rates_interval_covers_the_truth_95_times_in_100(kind: str, prompts: int) -> None:
    repetitions = 2000
    wins, truth = fractions(kind, (repetitions, prompts), torch.Generator().manual_seed(prompts))
    intervals = [win_rate_interval(row) for row in wins]
    covered = sum(f.low <= truth <= f.high for f in intervals) / repetitions
    # three standard errors of 2000 repetitions are 0.015; few prompts may cover more, never less
    assert covered >= 0.935
    assert covered <= 0.965 or prompts < 400
    if prompts == 400:  # and it is no wider than the normal interval of what was drawn
        width = sum(f.high - f.low for f in intervals) / repetitions
        assert width == pytest.approx(2 * 1.96 * wins.std(1).mean().item() / 20, rel=0.05)


def test_the_interval_of_a_ratio_by_hand() -> None:
    """r = 6 / 12; what is left of the totals is -1, 0 and 1, beside counts of 4 in the mean."""
    interval = ratio_interval(torch.tensor([0.0, 2.0, 4.0]), torch.tensor([2, 4, 6]))
    half = 4.303 * math.sqrt(1.0 / 3) / 4
    assert interval.mean == 0.5
    assert (interval.low, interval.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)


@pytest.mark.parametrize("prompts", [10, 100])
def test_the_means_interval_covers_the_truth_95_times_in_100(prompts: int) -> None:
    draws = torch.randn((2000, prompts), generator=torch.Generator().manual_seed(1)) * 3 + 7
    intervals = [mean_interval(row) for row in draws]
    assert sum(f.low <= 7 <= f.high for f in intervals) / 2000 == pytest.approx(0.95, abs=0.015)


def test_wins_are_counted_over_pairs_of_different_draws() -> None:
    none = torch.zeros(2, 2, 2, dtype=torch.bool)
    own, other = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    # prompt 1: 3 against 2 won, 0 against 1 lost; prompt 2: 1 against 0 won, 1 against 1 tied
    assert pair_wins(own, other, none).mean(1).tolist() == [0.5, 0.75]
    one_same = none.clone()
    one_same[0, 0, 1] = True
    assert pair_wins(own, other, one_same).mean(1).tolist() == [0.25, 0.75]


def test_the_gain_that_prompts_show() -> None:
    """(1.9600 + 0.8416) s / sqrt(N), and the N of the next smaller round gain."""
    assert power(100, 0.5) == "100 prompts detect a gain of 0.14 with 80 % power; a gain of 0.1 needs 197 prompts"
    assert (
        power(1000, 0.05)
        == "1,000 prompts detect a gain of 0.0044 with 80 % power; a gain of 0.002 needs 4,906 prompts"
    )
    assert power(100).startswith("100 prompts detect a gain of 0.28 standard deviations with 80 % power")
    draws = 0.28016 + torch.randn(3000, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shown = sum(mean_interval(gains).low > 0 for gains in draws) / len(draws)
    assert abs(shown - 0.8) < 4 * (0.8 * 0.2 / len(draws)) ** 0.5 + 0.01, "t needs 1 % more than the normal quantile"


def test_a_change_of_log_odds_by_hand() -> None:
    """1 of 4, then 3 of 4: log(3.5 / 1.5) - log(1.5 / 3.5), variance 2 / 3.5 + 2 / 1.5."""
    change = log_odds_change(1, 3, 4)
    assert change.mean == pytest.approx(2 * math.log(3.5 / 1.5)) and log_odds_change(2, 2, 4).mean == 0
    assert change.half_width == pytest.approx(1.959964 * math.sqrt(2 / 3.5 + 2 / 1.5), rel=1e-6)
    assert math.isfinite(log_odds_change(0, 4, 4).high)
