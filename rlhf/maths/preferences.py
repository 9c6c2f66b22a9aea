"""How well scores order pairs: accuracy, calibration, agreement. Pure functions.

N pairs. gaps [N]: score of the chosen response minus that of the rejected one. elements [N] long: pairs with one number
are comparisons of one ranked list, and together count as one pair (InstructGPT, arXiv 2203.02155, eq. 1).
"""

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


def accuracy(gaps: Tensor, elements: Tensor, together: int = 1) -> Interval:
    """The share of pairs in the right order, each element weighing as one pair, with its 95 % interval.
    together: as of `mean_interval`."""
    return win_rate_interval(by_element(in_order(gaps), elements), together)


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


def calibration_error(gaps: Tensor) -> float:
    """Expected calibration error (Naeini et al. 2015; arXiv 1706.04599, eq. 3): the mean over pairs of the distance
    between observed and predicted share of their bin.

    Bradley-Terry predicts P(chosen is preferred) = sigmoid(gap). The order of the sides is arbitrary, so the prediction
    is that of the side with the higher score, and the bins are CALIBRATION_BINS equal ranges from 1/2 to 1. Every pair
    counts as one.
    """
    predicted, right = torch.sigmoid(gaps.double().abs()), in_order(gaps)
    number = ((predicted - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    inside = [number == n for n in number.unique()]
    distances = (int(b.sum()) * abs(right[b].mean().item() - predicted[b].mean().item()) for b in inside)
    return sum(distances) / len(gaps)


def agreement(gaps: Tensor) -> Tensor:
    """The share of pairs that two models order alike, a tie one half; float64 [M, M]. gaps [M, N] of M models."""
    signs = gaps.double().sign()
    return (1 + signs @ signs.T / gaps.shape[1]) / 2


def position_bias(verdicts: Tensor) -> dict[str, float]:
    """How much the order of two responses decides. verdicts [N, 2]: 1 if the second of a pair is better, 0 if the first
    is, anything else if neither; with the first before the second, and in the other order.

    `first_place`: share of the verdicts for one response that are for the one that stood first, 0.5 without a bias.
    `flipped`: share of the pairs with two such verdicts that another response wins in the other order. Empty without
    such a pair.
    """
    decided, for_first = (verdicts == 0) | (verdicts == 1), verdicts == torch.tensor([0.0, 1.0])
    in_both = verdicts[decided.all(1)]
    if not len(in_both):
        return {}
    shares = {"first_place": for_first[decided], "flipped": in_both[:, 0] != in_both[:, 1]}
    return {name: share.double().mean().item() for name, share in shares.items()}
