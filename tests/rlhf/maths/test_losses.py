"""The losses against plain Python in float64, finite differences, hand-worked numbers and invariants."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from rlhf.maths import losses, ops

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
LENGTHS = torch.tensor([5, 1, 2, 4, 1, 3, 0, 5])
MASK = torch.arange(5) < LENGTHS.unsqueeze(1)
COUNT = float(LENGTHS.sum())
SHAPE = (8, 5)
CLIP = (0.2, 0.2)

Result = tuple[Tensor, dict[str, Tensor]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def nll(x: Tensor, data: list[Tensor], mask: Tensor) -> Result:
    return losses.token_nll(x, mask, COUNT)


def policy(x: Tensor, data: list[Tensor], mask: Tensor) -> Result:
    return losses.clipped_policy(x, data[0], data[1], mask, CLIP, COUNT)


def value(x: Tensor, data: list[Tensor], mask: Tensor) -> Result:
    return losses.clipped_value(x, data[0], data[1], mask, 0.2, COUNT)


def kl(x: Tensor, data: list[Tensor], mask: Tensor) -> Result:
    return losses.kl_penalty(x, data[0], mask, "k3", COUNT), {}


Loss = Callable[[Tensor, list[Tensor], Tensor], Result]
TOKEN_LOSSES: list[Loss] = [nll, policy, value, kl]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """x near the first of the data tensors, so that ratios lie in and out of the clip range."""
    old = normal(*SHAPE, dtype=dtype)
    x = (old + 0.4 * normal(*SHAPE, seed=1, dtype=dtype)).requires_grad_()
    return x, [old, normal(*SHAPE, seed=2, dtype=dtype)]


# Worth of each loss, in plain Python


def clamp(x: float, low: float, high: float) -> float:
    return low if x < low else min(x, high)


@pytest.mark.parametrize("high", [0.2, 0.5])
def test_policy_loss_matches_float64(high: float) -> None:
    x, (old, advantages) = inputs()
    loss, metrics = losses.clipped_policy(x, old, advantages, MASK, (0.2, high), COUNT)
    total = kl = clipped = ratios = squares = 0.0
    gradient = torch.zeros(SHAPE, dtype=torch.float64)
    for b, t in MASK.nonzero().tolist():
        a, d = float(advantages[b, t]), float(x.detach()[b, t].double() - old[b, t].double())
        ratio = math.exp(d)
        # Eq. 7 case by case: gain is capped above for A > 0 and below for A < 0.
        binds = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 0.8)
        total -= a * (clamp(ratio, 0.8, 1 + high) if binds else ratio)
        gradient[b, t] = 0.0 if binds else -a * ratio / COUNT
        kl, clipped, ratios, squares = kl + ratio - 1 - d, clipped + binds, ratios + ratio, squares + (ratio - 1) ** 2
    assert float(loss.detach()) == pytest.approx(total / COUNT, abs=1e-6)
    assert 0 < clipped < COUNT
    means = {"approx_kl": kl, "clip_fraction": clipped, "ratio_mean": ratios, "ratio_square": squares}
    for name, expected in means.items():
        assert float(metrics[name]) == pytest.approx(expected / COUNT, abs=1e-6), name
    (actual,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(actual.double(), gradient, atol=1e-7, rtol=0)


def test_a_bad_token_that_became_likely_has_a_bounded_loss() -> None:
    """Ratios 4, 4, 2, 1/2 with advantages 1, -1, -1, -1 and a bound of 3: gains 1.2, -3, -2, -0.8."""
    d = math.log(2.0)
    x = torch.tensor([[2 * d, 2 * d, d, -d]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -1.0, -1.0, -1.0]]), torch.ones(1, 4, dtype=torch.bool)
    loss, metrics = losses.clipped_policy(x, torch.zeros(1, 4), advantages, mask, CLIP, 4, dual_clip=3.0)
    assert float(loss.detach()) == pytest.approx((-1.2 + 3 + 2 + 0.8) / 4)
    assert float(metrics["dual_clip_fraction"]) == 0.25 and float(metrics["clip_fraction"]) == 0.5
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.flatten().tolist() == pytest.approx([0.0, 0.0, 2 / 4, 0.0])


def test_value_loss_matches_float64() -> None:
    x, (old, returns) = inputs()
    loss, metrics = losses.clipped_value(x, old, returns, MASK, 0.2, COUNT)
    total, clipped = 0.0, 0
    for b, t in MASK.nonzero().tolist():
        v, o, r = float(x.detach()[b, t]), float(old[b, t]), float(returns[b, t])
        free, clamped = (v - r) ** 2, (clamp(v, o - 0.2, o + 0.2) - r) ** 2
        # The pessimistic of the two: a step beyond the range earns nothing more.
        total += 0.5 * (clamped if clamped > free else free)
        clipped += abs(v - o) > 0.2 and clamped > free
    assert float(loss.detach()) == pytest.approx(total / COUNT, rel=1e-6)
    assert 0 < clipped < COUNT
    assert float(metrics["value_clip_fraction"]) == pytest.approx(clipped / COUNT, abs=1e-6)


def test_value_loss_by_hand() -> None:
    # V left the range towards R = 2 (held at 0.2), left it away from R, stayed inside.
    values = torch.tensor([[1.0, -1.0, 0.1]], requires_grad=True)
    returns, mask = torch.full((1, 3), 2.0), torch.ones(1, 3, dtype=torch.bool)
    loss, metrics = losses.clipped_value(values, torch.zeros(1, 3), returns, mask, 0.2, 3)
    assert float(loss.detach()) == pytest.approx(0.5 * (1.8**2 + 3.0**2 + 1.9**2) / 3)
    assert float(metrics["value_clip_fraction"]) == pytest.approx(1 / 3)
    torch.testing.assert_close(torch.autograd.grad(loss, values)[0], torch.tensor([[0.0, -1.0, -1.9 / 3]]))


def test_an_infinite_value_range_is_half_the_squared_error() -> None:
    x, (old, returns) = inputs()
    loss, metrics = losses.clipped_value(x, old, returns, MASK, math.inf, COUNT)
    torch.testing.assert_close(loss, 0.5 * (x - returns)[MASK].square().mean())
    assert float(metrics["value_clip_fraction"]) == 0.0


def test_no_token_inside_the_value_range_counts_as_clipped() -> None:
    # Drawn apart: old + (v - old) is then often not v, by a rounding that must not count.
    values, old, returns = (0.03 * normal(*SHAPE, seed=seed) for seed in range(3))
    assert float((values - old).abs().max()) < 0.2
    _, metrics = losses.clipped_value(values, old, returns, MASK, 0.2, COUNT)
    assert float(metrics["value_clip_fraction"]) == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_loss_matches_float64(estimator: ops.KLEstimator) -> None:
    """With policy and reference exchanged k1 changes its sign, and k3 is another number: exp(d) - 1 - d."""
    x, (reference, _) = inputs()
    apart = (x.detach().double() - reference.double())[MASK].tolist()
    total = sum({"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator] for d in apart)
    loss = losses.kl_penalty(x, reference, MASK, estimator, COUNT)
    # |d| < 2: exp and the sum of 21 terms round by less than 21 * 8 * eps / COUNT
    assert float(loss.detach()) == pytest.approx(total / COUNT, abs=1e-6)


def test_a_ratio_counts_up_to_its_bound_and_beyond_it_has_no_gradient() -> None:
    """e^20 and e^-20: at advantage -1 the loss is the ratio itself, and no product of inf and 0 arises."""
    x = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    far, advantages, mask = torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    loss, metrics = losses.clipped_policy(x, far, advantages, mask, CLIP, 2)
    assert float(loss.detach()) == pytest.approx((math.exp(20) - math.exp(-20)) / 2, rel=1e-6)
    assert float(metrics["ratio_mean"]) == pytest.approx(math.exp(20) / 2, rel=1e-6)
    assert torch.autograd.grad(loss, x)[0].tolist() == [[0.0, 0.0]]
    _, metrics = losses.clipped_policy(x.detach()[:, 1:], far[:, 1:], advantages[:, 1:], mask[:, 1:], CLIP, 1)
    assert float(metrics["approx_kl"]) == pytest.approx(math.exp(-20) - 1 + 20, rel=1e-6)


def test_k3_counts_up_to_its_bound_and_beyond_it_has_no_gradient() -> None:
    """exp(2) - 1 - 2 and its derivative 1 - exp(2) below the bound; 10 nats and no gradient where it would be 7.8e2."""
    x, reference = torch.tensor([[-2.0, -6.66, -90.0, 90.0]], requires_grad=True), torch.zeros(1, 4)
    loss = losses.kl_penalty(x, reference, torch.ones(1, 4, dtype=torch.bool), "k3", 1)
    assert float(loss.detach()) == pytest.approx(math.exp(2) - 3 + 10 + 10 + 10, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient[0].tolist() == pytest.approx([1 - math.exp(2), 0, 0, 0], rel=1e-6)


def test_token_nll_is_cross_entropy() -> None:
    logits, ids = normal(*SHAPE, 7), torch.randint(7, SHAPE, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.cross_entropy(logits.double()[MASK], ids[MASK])
    loss, metrics = losses.token_nll(ops.token_logprobs(logits, ids), MASK, COUNT)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=0)
    assert float(metrics["nll"]) == float(loss)


def test_pairwise_matches_log1p_exp() -> None:
    chosen, rejected, margin = 5 * normal(8), 5 * normal(8, seed=1), normal(8, seed=2).abs()
    pairs = list(zip(chosen.double().tolist(), rejected.double().tolist(), margin.double().tolist(), strict=True))
    plain = sum(math.log1p(math.exp(-(c - r))) for c, r, _ in pairs) / 8
    assert float(losses.pairwise_logistic(chosen, rejected)) == pytest.approx(plain, abs=1e-6)
    full = sum(math.log1p(math.exp(-(c - r - m))) + 0.01 * (c + r) ** 2 for c, r, m in pairs) / 8
    loss, metrics = losses.pairwise_logistic(chosen, rejected, margin, 0.01), losses.pair_metrics(chosen, rejected)
    assert float(loss) == pytest.approx(full, abs=1e-6)
    assert float(metrics["accuracy"]) == sum(c > r for c, r, _ in pairs) / 8
    assert float(metrics["margin"]) == pytest.approx(sum(c - r for c, r, _ in pairs) / 8, abs=1e-6)


def test_pairs_of_a_ranked_list_weigh_as_one() -> None:
    """Three pairs of one list and a pair alone, count 2. Scores 1, 0, -1: the gaps are 1, 1, 2; the other's is -1."""
    chosen, rejected = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, -1.0, -1.0, 1.0])
    weight = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0])
    loss = losses.pairwise_logistic(chosen, rejected, count=2, weight=weight)
    metrics = losses.pair_metrics(chosen, rejected, 2, weight)
    one, two, lost = (math.log1p(math.exp(-gap)) for gap in (1, 2, -1))
    assert float(loss) == pytest.approx(((2 * one + two) / 3 + lost) / 2, rel=1e-6)
    assert float(metrics["accuracy"]) == pytest.approx(0.5) and float(metrics["margin"]) == pytest.approx(
        (4 / 3 - 1) / 2
    )


def test_pairwise_starts_at_log_two_and_half() -> None:
    scores = torch.zeros(4)
    loss, metrics = losses.pairwise_logistic(scores, scores), losses.pair_metrics(scores, scores)
    assert float(loss) == pytest.approx(math.log(2.0))
    assert float(metrics["accuracy"]) == 0.5 and float(metrics["margin"]) == 0.0


def test_pairwise_stays_finite_far_out() -> None:
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = losses.pairwise_logistic(chosen, torch.zeros(2))
    loss.backward()
    assert float(loss.detach()) == 5e3 and chosen.grad is not None and chosen.grad.tolist() == [-0.5, 0.0]


def test_centering_pulls_the_mean_of_a_pair_to_zero() -> None:
    scores = torch.tensor([1.5, 0.5], requires_grad=True)
    loss = losses.pairwise_logistic(scores[:1], scores[1:], centering=0.01)
    plain = losses.pairwise_logistic(scores[:1], scores[1:])
    pull = torch.autograd.grad(loss - plain, scores)[0]
    torch.testing.assert_close(pull, torch.tensor([0.04, 0.04]))


# Gradients


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=lambda f: f.__name__)
def test_token_losses_pass_gradcheck(loss: Loss) -> None:
    x, data = inputs(torch.float64)
    assert gradcheck(lambda x: loss(x, data, MASK)[0], x, eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=lambda f: f.__name__)
def test_low_precision_input_gives_a_float32_loss(loss: Loss) -> None:
    x, data = inputs()
    value, metrics = loss(x.detach().bfloat16(), [d.bfloat16() for d in data], MASK)
    assert {value.dtype, *(metric.dtype for metric in metrics.values())} == {torch.float32}


# Masks


def masked_run(loss: Loss, garbage: float) -> list[Tensor]:
    """Loss, metrics and gradient with `garbage` off the mask."""
    x, data = inputs()
    leaf = x.detach().masked_fill(~MASK, garbage).requires_grad_()
    value, metrics = loss(leaf, [d.masked_fill(~MASK, garbage) for d in data], MASK)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert bool((gradient[~MASK] == 0).all()), "gradient off the mask"
    return [value.detach(), gradient[MASK], *metrics.values()]


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=lambda f: f.__name__)
def test_garbage_after_the_end_changes_no_bit(loss: Loss) -> None:
    clean = masked_run(loss, 0.0)
    for garbage in GARBAGE:
        assert all(torch.equal(a, b) for a, b in zip(clean, masked_run(loss, garbage), strict=True)), garbage


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=lambda f: f.__name__)
def test_an_empty_micro_batch_is_zero(loss: Loss) -> None:
    x, data = inputs()
    value, metrics = loss(x, data, torch.zeros_like(MASK))
    assert float(value.detach()) == 0.0 and not any(float(metric) for metric in metrics.values())
    assert torch.equal(torch.autograd.grad(value, x)[0], torch.zeros(SHAPE))


# Parts of an optimizer step


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=lambda f: f.__name__)
def test_splitting_a_step_changes_no_sum_and_no_gradient(loss: Loss) -> None:
    x, data = inputs()
    whole, whole_metrics = loss(x, data, MASK)
    (gradient,) = torch.autograd.grad(whole, x)
    for size in (1, 2, 4):
        parts = [loss(x[rows], [d[rows] for d in data], MASK[rows]) for rows in torch.arange(len(x)).split(size)]
        total = torch.stack([part for part, _ in parts]).sum()
        torch.testing.assert_close(total, whole, atol=1e-6, rtol=0)
        assert torch.equal(torch.autograd.grad(total, x)[0], gradient)
        for name, metric in whole_metrics.items():
            added = torch.stack([metrics[name] for _, metrics in parts]).sum()
            torch.testing.assert_close(added, metric, atol=1e-6, rtol=0, msg=name)


def test_a_count_may_be_a_tensor_and_metrics_are_detached() -> None:
    x, (old, advantages) = inputs()
    for count in (COUNT, torch.tensor(COUNT), LENGTHS.sum()):
        loss, metrics = losses.clipped_policy(x, old, advantages, MASK, CLIP, count)
        assert float(loss.detach()) == float(policy(x, [old, advantages], MASK)[0].detach())
        assert not any(metric.requires_grad for metric in metrics.values())
    value_metrics = losses.clipped_value(x, old, advantages, MASK, 0.2, COUNT)[1]
    pair_metrics = losses.pair_metrics(x[:, 0], x[:, 1])
    for metric in (losses.token_nll(x, MASK, COUNT)[1] | value_metrics | pair_metrics).values():
        assert not metric.requires_grad and metric.dim() == 0
