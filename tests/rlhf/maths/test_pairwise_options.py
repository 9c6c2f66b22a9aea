"""Options of the reward model's loss: swapped labels."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from rlhf.maths import losses

QUARTER = 0.25


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def smoothed(chosen: Tensor, rejected: Tensor, share: float = QUARTER, margin: Tensor | None = None) -> Tensor:
    return losses.pairwise_logistic(chosen, rejected, margin, 0.0, None, None, share)


def test_smoothing_is_the_mean_over_swapped_labels() -> None:
    """A quarter of the labels swapped and no smoothing, or none swapped and a quarter smoothed: one loss."""
    for gap in (-3.0, 0.0, 0.7, 40.0):
        right, swapped = [gap] * 3 + [0.0], [0.0] * 3 + [gap]
        expected = losses.pairwise_logistic(column(*right), column(*swapped))
        assert smoothed(column(gap), column(0.0)).item() == pytest.approx(expected.item(), rel=1e-12)
    loss = smoothed(column(2.0), column(0.5), 0.1, column(0.4))
    assert loss.item() == pytest.approx(0.9 * math.log1p(math.exp(-1.1)) + 0.1 * math.log1p(math.exp(1.1)), rel=1e-12)


def test_smoothing_passes_gradcheck() -> None:
    chosen, rejected = (column(0.3, -2.0, 5.0).requires_grad_(), column(0.1, 0.4, -1.0).requires_grad_())
    assert gradcheck(smoothed, (chosen, rejected))
