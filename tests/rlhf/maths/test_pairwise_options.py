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


@pytest.mark.parametrize("share", [0.25, 0.05, 0.4])
def test_the_best_gap_is_finite(share: float) -> None:
    """log((1 - e) / e): the derivative of the loss is 0 there, and negative and positive beside it. In training by
    Newton's method, the gap goes there; the accuracy that sigmoid(gap) predicts is 1 - e."""
    best = math.log((1 - share) / share)
    gap = column(0.0)
    for _ in range(8):
        gap = gap.detach().requires_grad_()
        (slope,) = torch.autograd.grad(smoothed(gap, column(0.0), share), gap, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), gap)
        gap = gap - slope / bend
    assert gap.item() == pytest.approx(best, rel=1e-9)
    assert torch.sigmoid(gap).item() == pytest.approx(1 - share, rel=1e-9)
    plain = torch.autograd.grad(losses.pairwise_logistic(gap, column(0.0)), gap)[0]
    assert plain.item() < -share / 2  # without smoothing the gap would still grow


def test_no_smoothing_is_the_plain_loss_bit_by_bit() -> None:
    chosen, rejected = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    plain = losses.pairwise_logistic(chosen, rejected, centering=0.01)
    assert torch.equal(plain, losses.pairwise_logistic(chosen, rejected, centering=0.01, label_smoothing=0.0))


def test_smoothing_passes_gradcheck() -> None:
    chosen, rejected = (column(0.3, -2.0, 5.0).requires_grad_(), column(0.1, 0.4, -1.0).requires_grad_())
    assert gradcheck(smoothed, (chosen, rejected))
