"""Options of the reward model's loss: swapped labels, and the language-model loss on the chosen responses."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import cross_entropy

from rlhf.maths import losses

QUARTER = 0.25


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def smoothed(chosen: Tensor, rejected: Tensor, share: float = QUARTER, margin: Tensor | None = None) -> Tensor:
    return losses.pairwise_logistic(chosen, rejected, margin, 0.0, None, None, share)[0]


def test_smoothing_is_the_mean_over_swapped_labels() -> None:
    """A quarter of the labels swapped and no smoothing, or none swapped and a quarter smoothed: one loss."""
    for gap in (-3.0, 0.0, 0.7, 40.0):
        right, swapped = [gap] * 3 + [0.0], [0.0] * 3 + [gap]
        expected = losses.pairwise_logistic(column(*right), column(*swapped))[0]
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
    plain = torch.autograd.grad(losses.pairwise_logistic(gap, column(0.0))[0], gap)[0]
    assert plain.item() < -share / 2  # without smoothing the gap would still grow


def test_no_smoothing_is_the_plain_loss_bit_by_bit() -> None:
    chosen, rejected = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    plain = losses.pairwise_logistic(chosen, rejected, centering=0.01)[0]
    assert torch.equal(plain, losses.pairwise_logistic(chosen, rejected, centering=0.01, label_smoothing=0.0)[0])


def test_smoothing_passes_gradcheck() -> None:
    chosen, rejected = (column(0.3, -2.0, 5.0).requires_grad_(), column(0.1, 0.4, -1.0).requires_grad_())
    assert gradcheck(smoothed, (chosen, rejected))


def test_the_language_model_loss_is_a_mean_over_pairs_of_means_over_tokens() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    mask = torch.tensor([[False, True, True, True], [False, False, True, False]])
    logprobs = logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
    by_row = [cross_entropy(logits[0, 1:], ids[0, 1:]), cross_entropy(logits[1, 2:3], ids[1, 2:3])]
    garbage = logprobs.masked_fill(~mask, math.nan).requires_grad_()
    loss = losses.chosen_nll(garbage, mask, None, 2)
    assert loss.item() == pytest.approx((by_row[0] + by_row[1]).item() / 2, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, garbage)
    assert gradient.tolist() == [[0, *[pytest.approx(-1 / 6)] * 3], [0, 0, -1 / 2, 0]]
    weighted = losses.chosen_nll(garbage, mask, column(0.5, 0.0), 3)
    assert weighted.item() == pytest.approx(by_row[0].item() / 6, rel=1e-12)


def test_the_correlation_of_score_and_length_within_pairs() -> None:
    """Pearson's correlation of all responses, scores and lengths without the means of their pairs; its gradient is that
    of float64 autograd; it does not depend on which side is called chosen, nor on the scale of scores."""
    draw = torch.Generator().manual_seed(3)
    scores, lengths = torch.randn(7, 2, generator=draw).double(), torch.randint(1, 30, (7, 2), generator=draw)
    weight = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0, 1.0, 1.0])
    gaps, length_gaps = (scores[:, 0] - scores[:, 1]).requires_grad_(), lengths[:, 0] - lengths[:, 1]

    def correlation(gaps: Tensor, length_gaps: Tensor) -> Tensor:
        sides = torch.stack([torch.stack([x, -x]).flatten() / 2 for x in (gaps, length_gaps.double())])
        weighted = sides * torch.cat([weight, weight]).double().sqrt()
        return (weighted[0] @ weighted[1]) / (weighted[0].norm() * weighted[1].norm())

    def correlation_of_parts(gaps: Tensor, length_gaps: Tensor) -> tuple[float, Tensor]:
        detached = gaps.detach()
        parts = (losses.gap_moments(detached[p], length_gaps[p], weight[p]) for p in (slice(0, 3), slice(3, 7)))
        return losses.squared_correlation(detached, length_gaps, weight, sum(parts, torch.zeros(3).double()))

    rho, gradient = correlation_of_parts(gaps, length_gaps)
    expected = correlation(gaps, length_gaps)
    assert rho == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected**2, gaps)[0], rtol=1e-12, atol=1e-15)
    assert (gradient * gaps).sum().item() == pytest.approx(0, abs=1e-14)
    swaps = torch.tensor([1, -1, -1, 1, 1, -1, 1])
    assert correlation_of_parts(swaps * gaps, swaps * length_gaps)[0] == pytest.approx(rho, rel=1e-12)
    assert correlation_of_parts(100 * gaps, length_gaps)[0] == pytest.approx(rho, rel=1e-12)
    for nothing in ((0 * gaps, length_gaps), (gaps, 0 * length_gaps)):
        rho, gradient = correlation_of_parts(*nothing)
        assert rho == 0 and not gradient.any()


def test_the_error_of_ratings_is_a_mean_over_pairs_of_means_over_ratings() -> None:
    none = math.nan
    ratings = torch.tensor(
        [[[1.0, none], [3.0, 2.0]], [[none, none]] * 2, [[0.0, 0.0], [0.0, none]]], dtype=torch.float64
    )
    predicted = torch.full_like(ratings, 1.0).requires_grad_()
    weight = column(1.0, 1.0, 0.5)
    error = losses.rating_error(predicted, ratings, weight, 3)
    assert error.item() == pytest.approx(((0 + 4 + 1) / 3 + 0 + 0.5 * (1 + 1 + 1) / 3) / 3, rel=1e-12)
    (slope,) = torch.autograd.grad(error, predicted)
    assert slope.isfinite().all() and not slope[ratings.isnan()].any()
    assert slope[0, 1].tolist() == pytest.approx([2 * (1 - 3) / 3 / 3, 2 * (1 - 2) / 3 / 3], rel=1e-12)
