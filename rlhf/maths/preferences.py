"""How well scores order pairs: accuracy, its length-only baseline, calibration, agreement. Pure functions.

N pairs. gaps [N]: score of the chosen response minus that of the rejected one. elements [N] long: pairs with one number
are comparisons of one ranked list, and together count as one pair (InstructGPT, arXiv 2203.02155, eq. 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.maths.intervals import Interval, win_rate_interval

CALIBRATION_BINS = 6


def in_order(gaps: Tensor) -> Tensor:
    """1 for a pair in the right order, 1/2 for a tie, 0 for the wrong order. [N] -> float64 [N]."""
    return (gaps.double().sign() + 1) / 2


def by_element(values: Tensor, elements: Tensor) -> Tensor:
    """The mean of `values` [N] over the pairs of each element. -> float64 [E], in order of the elements' numbers."""
    _, index, counts = elements.unique(return_inverse=True, return_counts=True)
    return torch.zeros(len(counts), dtype=torch.float64).index_add(0, index, values.double()) / counts


def accuracy(gaps: Tensor, elements: Tensor) -> Interval:
    """The share of pairs in the right order, each element weighing as one pair, with its 95 % interval."""
    return win_rate_interval(by_element(in_order(gaps), elements))


def list_accuracy(gaps: Tensor, elements: Tensor) -> Interval | None:
    """The share of the elements with several pairs whose pairs are all in the right order; None if there are none.

    For one chosen response beside K - 1 rejected ones it is the accuracy of best-of-K. A chosen response that ties with
    t others, and is below none, counts 1 / (1 + t): what a random choice among the best would give.
    """
    _, index, counts = elements.unique(return_inverse=True, return_counts=True)
    nothing = torch.zeros(len(counts), dtype=torch.float64)
    wrong, tied = (nothing.index_add(0, index, hit.double()) for hit in (gaps < 0, gaps == 0))
    right = ((wrong == 0) / (1 + tied))[counts > 1]
    return win_rate_interval(right) if len(right) else None


@dataclass(frozen=True, slots=True)
class LengthRule:
    """What lengths alone say of the pairs."""

    longer: float
    """accuracy of preferring the longer response; equal lengths are ties"""
    correlation: float | None
    """Pearson's, of the gap in score and the gap in length; None if one of them does not vary"""

    @property
    def best(self) -> float:
        """Accuracy of the better of the two rules without a threshold, "the longer" and "the shorter"."""
        return max(self.longer, 1 - self.longer)


def length_rule(gaps: Tensor, length_gaps: Tensor, elements: Tensor) -> LengthRule:
    """length_gaps [N]: tokens of the chosen response minus those of the rejected one."""
    longer = by_element(in_order(length_gaps), elements).mean().item()
    both = torch.stack([gaps.double(), length_gaps.double()])
    varies = len(gaps) > 1 and bool((both != both[:, :1]).any(1).all())
    return LengthRule(longer, torch.corrcoef(both)[0, 1].item() if varies else None)


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Pairs of similar predicted accuracy."""

    predicted: float
    """mean of sigmoid(|gap|)"""
    observed: Interval
    """share in the right order"""
    pairs: int


def calibration(gaps: Tensor, bins: int = CALIBRATION_BINS) -> list[CalibrationBin]:
    """The reliability diagram: pairs in `bins` equal ranges of sigmoid(|gap|), from 1/2 to 1, without the empty ones.

    Bradley-Terry predicts P(chosen is preferred) = sigmoid(gap). The order of the sides is arbitrary, so the prediction
    is that of the side with the higher score. Every pair counts as one.
    """
    predicted, right = torch.sigmoid(gaps.double().abs()), in_order(gaps)
    number = ((predicted - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    inside = [number == n for n in range(bins)]
    return [
        CalibrationBin(predicted[each].mean().item(), win_rate_interval(right[each]), int(each.sum()))
        for each in inside
        if each.any()
    ]


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Expected calibration error (Naeini et al. 2015; arXiv 1706.04599, eq. 3): the mean over pairs of the distance
    between observed and predicted share of their bin."""
    return sum(each.pairs * abs(each.observed.mean - each.predicted) for each in bins) / sum(
        each.pairs for each in bins
    )


def agreement(gaps: Tensor) -> Tensor:
    """The share of pairs that two models order alike, a tie one half; float64 [M, M]. gaps [M, N] of M models."""
    signs = gaps.double().sign()
    return (1 + signs @ signs.T / gaps.shape[1]) / 2


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Several models as one."""

    accuracy: Interval
    """of the mean of the members' gaps, each divided by the standard deviation of the member's scores"""
    unanimous: float
    """share of the pairs that all members order alike"""
    accuracy_unanimous: Interval | None
    """on those pairs; None if there are none"""
    accuracy_divided: Interval | None
    """of the mean on the other pairs; None if there are none"""


def ensemble(gaps: Tensor, deviations: Tensor, elements: Tensor) -> Ensemble:
    """gaps [M, N] of M members; deviations [M]: standard deviation of each member's scores."""
    scale = torch.where(deviations > 0, deviations, torch.ones_like(deviations)).double()
    mean = (gaps.double() / scale[:, None]).mean(0)
    alike = (gaps.sign() == gaps[:1].sign()).all(0)
    parts = [accuracy(mean[part], elements[part]) if part.any() else None for part in (alike, ~alike)]
    return Ensemble(accuracy(mean, elements), alike.double().mean().item(), *parts)
