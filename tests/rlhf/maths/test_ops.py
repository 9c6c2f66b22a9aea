"""Masks, log-probabilities, moments and KL estimates against numbers worked by hand, float64 and invariants."""

import math
import random
import statistics

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from rlhf.maths import ops
from rlhf.types import token_groups

LEFT_RIGHT = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_positions_count_real_tokens() -> None:
    real = [row[mask].tolist() for row, mask in zip(ops.positions(LEFT_RIGHT), LEFT_RIGHT, strict=True)]
    assert real == [[0, 1, 2], [0, 1, 2, 3, 4, 5], [0]]
    assert ops.positions(LEFT_RIGHT).dtype == torch.long
    assert int(ops.positions(LEFT_RIGHT).max()) < LEFT_RIGHT.size(1)


def test_last_index_is_the_last_true() -> None:
    holes = torch.tensor([[1, 0, 1, 0, 0, 0]]).bool()
    assert ops.last_index(torch.cat([LEFT_RIGHT, holes])).tolist() == [4, 5, 5, 2]


def test_last_index_refuses_an_empty_row() -> None:
    with pytest.raises(AssertionError, match="no True"):
        ops.last_index(torch.tensor([[True], [False]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_logprobs_match_float64(dtype: torch.dtype) -> None:
    logits = (6 * torch.randn(2, 5, 1000, generator=generator())).to(dtype)
    ids = torch.randint(1000, (2, 5), generator=generator(1))
    expected = -torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1) / 0.7, ids.flatten(), reduction="none"
    ).view(2, 5)
    logprobs = ops.token_logprobs(logits, ids, temperature=0.7)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_entropy_of_known_distributions() -> None:
    certain = torch.tensor([0.0, 1e4, 0.0, 0.0])
    coin = torch.tensor([0.0, 0.0, -math.inf, -math.inf])
    biased = torch.tensor([math.log(3.0), 0.0, -math.inf, -math.inf])
    entropy = ops.entropy(torch.stack([torch.zeros(4), certain, coin, biased]).unsqueeze(0))
    quarter = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(entropy, torch.tensor([[math.log(4), 0.0, math.log(2), quarter]]))
    odds = math.sqrt(3) / (1 + math.sqrt(3))
    tempered = -odds * math.log(odds) - (1 - odds) * math.log(1 - odds)
    torch.testing.assert_close(ops.entropy(biased.view(1, 1, 4), temperature=2.0), torch.tensor([[tempered]]))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0, 1e4])
def test_entropy_is_never_negative(scale: float) -> None:
    entropy = ops.entropy(scale * torch.randn(1, 200, 50, generator=generator()))
    assert bool((entropy >= 0).all()) and bool((entropy <= math.log(50) + 1e-5).all())


def test_entropy_gradient_is_finite_beside_a_forbidden_token() -> None:
    logits = torch.tensor([[[0.3, -math.inf, -1.0]]], requires_grad=True)
    ops.entropy(logits).sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    assert float(logits.grad[0, 0, 1]) == 0.0


def test_logprob_gradients() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator(), requires_grad=True)
    ids = torch.randint(5, (2, 3), generator=generator())
    assert gradcheck(lambda x: ops.token_logprobs(x, ids, 0.7), logits, eps=1e-6, atol=1e-6, rtol=1e-5)
    assert gradcheck(lambda x: ops.entropy(x, 0.7), logits, eps=1e-6, atol=1e-6, rtol=1e-5)


def _masked_results(garbage: float) -> list[Tensor]:
    leaf = torch.randn(3, 6, generator=generator()).masked_fill(~LEFT_RIGHT, garbage).requires_grad_()
    mean = ops.masked_mean(leaf, LEFT_RIGHT)
    (gradient,) = torch.autograd.grad(mean, leaf)
    x = leaf.detach()
    moments = ops.moments(x, LEFT_RIGHT)
    return [mean, gradient, moments, ops.whiten(x, LEFT_RIGHT, *ops.mean_var(moments))]


def test_garbage_off_the_mask_changes_no_bit() -> None:
    clean = _masked_results(0.0)
    assert torch.equal(clean[1] == 0, ~LEFT_RIGHT) and torch.equal(clean[3] == 0, ~LEFT_RIGHT)
    for garbage in GARBAGE:
        assert all(torch.equal(a, b) for a, b in zip(clean, _masked_results(garbage), strict=True))


def test_a_mask_that_is_not_bool_is_refused() -> None:
    with pytest.raises((RuntimeError, TypeError)):
        ops.masked_mean(torch.ones(2), torch.tensor([0.0, 1.0]))


def test_masked_mean_by_hand() -> None:
    x, mask = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert float(ops.masked_mean(x, mask)) == 3.0
    assert float(ops.masked_mean(x, mask, count=18.0)) == 0.5
    assert float(ops.masked_mean(x, mask, count=1.0)) == float(ops.masked_mean(x, mask, count=torch.tensor(1))) == 9.0
    assert float(ops.masked_mean(x, mask, count=torch.tensor(18))) == 0.5
    nothing = torch.zeros_like(mask)
    assert float(ops.masked_mean(x, nothing)) == 0.0 and float(ops.masked_mean(x, nothing, count=0.0)) == 0.0


def _random_masked() -> tuple[Tensor, Tensor, list[float]]:
    x = 3 + 2 * torch.randn(10, 20, generator=generator())
    mask = torch.rand(10, 20, generator=generator(1)) < 0.5
    return x, mask, [float(value) for value in x[mask].double()]


def test_mean_and_biased_variance() -> None:
    x, mask, values = _random_masked()
    mean, var = ops.mean_var(ops.moments(x, mask))
    assert math.isclose(float(mean), statistics.fmean(values), rel_tol=1e-12)
    # At about 100 tokens the unbiased variance is 1 % larger: far outside this gate.
    assert math.isclose(float(var), statistics.pvariance(values), rel_tol=1e-9)


def test_what_rounding_leaves_is_no_variance() -> None:
    """A share of the mean square, however large that is: 1e-13 is nothing, 1e-8 is not."""
    for mean_square, share, significant in ((1e4, 1e-13, False), (1e-4, 1e-8, True)):
        mean = mean_square**0.5
        squares = mean_square * (1 + share)
        variance = float(ops.mean_var(torch.tensor([1.0, mean, squares], dtype=torch.float64))[1])
        assert variance == pytest.approx(mean_square * share if significant else 0.0, rel=1e-6, abs=0)


def test_moments_of_ranks_add_up() -> None:
    x, mask, _ = _random_masked()
    whole = ops.mean_var(ops.moments(x, mask))
    for size in (1, 3, 5):
        parts = [ops.moments(a, m) for a, m in zip(x.split(size), mask.split(size), strict=True)]
        torch.testing.assert_close(ops.mean_var(torch.stack(parts).sum(0)), whole, rtol=1e-12, atol=0)


def test_whiten_matches_float64() -> None:
    x, mask, values = _random_masked()
    centre, spread = statistics.fmean(values), math.sqrt(statistics.pvariance(values) + 1e-8)
    moments = ops.mean_var(ops.moments(x, mask))
    white = ops.whiten(x, mask, *moments)
    assert white.dtype == x.dtype and bool((white[~mask] == 0).all())
    expected = torch.tensor([(value - centre) / spread for value in values])
    torch.testing.assert_close(white[mask], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [0.1, -7.3, 1e6])
def test_constant_input_whitens_to_exact_zeros(value: float) -> None:
    x, mask = torch.full((3, 6), value), LEFT_RIGHT
    white = ops.whiten(x, mask, *ops.mean_var(ops.moments(x, mask)))
    assert torch.equal(white, torch.zeros(3, 6))


def test_one_token_and_no_token_whiten_to_zero() -> None:
    x = torch.tensor([[2.5, math.nan], [math.inf, math.nan]])
    one = torch.tensor([[True, False], [False, False]])
    for mask in (one, torch.zeros_like(one)):
        assert torch.equal(ops.whiten(x, mask, *ops.mean_var(ops.moments(x, mask))), torch.zeros(2, 2))
    mean, var = ops.mean_var(ops.moments(x, torch.zeros_like(one)))
    assert float(mean) == 0.0 and float(var) == 0.0


def test_variance_is_never_negative() -> None:
    draw = random.Random(0)
    for _ in range(200):
        x = torch.full((7,), draw.uniform(-1e6, 1e6), dtype=torch.float64) + draw.uniform(0, 1e-9)
        assert float(ops.mean_var(ops.moments(x, torch.ones(7).bool()))[1]) >= 0.0


def test_kl_estimates_by_hand() -> None:
    policy, reference = torch.tensor([math.log(0.5), math.log(0.2)]), torch.tensor([math.log(0.25), math.log(0.4)])
    two = math.log(2.0)
    expected: dict[ops.KLEstimator, list[float]] = {
        "k1": [two, -two],
        "k2": [two**2 / 2] * 2,
        "k3": [0.5 - 1 + two, 2 - 1 - two],
    }
    for kind, numbers in expected.items():
        torch.testing.assert_close(ops.kl_estimate(policy, reference, kind), torch.tensor(numbers))


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e-2, 1.0, 10.0])
def test_k3_is_never_negative(scale: float) -> None:
    d = scale * torch.randn(20_000, generator=generator())
    assert bool((ops.kl_estimate(d, torch.zeros_like(d), "k3") >= 0).all())


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(AssertionError, match="k4"):
        ops.kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


# --- rows without padding on the left


def test_flush_left_moves_the_tokens_and_their_positions_say_where() -> None:
    ids = torch.tensor([[9, 9, 5, 6, 7], [5, 9, 6, 9, 9], [1, 2, 3, 9, 9]])
    mask = ids != 9
    moved = ops.flush_left(ids, mask)
    assert [row[: int(n)].tolist() for row, n in zip(moved, mask.sum(1), strict=True)] == [[5, 6, 7], [5, 6], [1, 2, 3]]
    assert moved.shape == (3, 3)
    assert torch.equal(moved.gather(1, ops.positions(mask).clamp(max=2))[mask], ids[mask])


# --- log-probs and entropies in one pass


@pytest.mark.parametrize("cached", [1, 40, 2**22])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_one_pass_gives_log_softmax_its_gradient_and_its_entropy(
    cached: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 log_softmax under autograd, however few rows are looked at together."""
    monkeypatch.setattr(ops, "CACHED", cached)
    draw = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(3, 4, 11, generator=draw, dtype=torch.float64)).requires_grad_()
    ids = torch.randint(11, (3, 4), generator=draw)
    weights = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    expected = (logits / temperature).log_softmax(-1)
    chosen = expected.gather(-1, ids[..., None]).squeeze(-1)
    (wanted,) = torch.autograd.grad((chosen * weights).sum(), logits)
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        inputs = logits.detach().to(dtype).requires_grad_()
        logprobs, entropy = ops.logprobs_and_entropy(inputs, ids, temperature)
        (gradient,) = torch.autograd.grad((logprobs * weights.to(logprobs.dtype)).sum(), inputs)
        assert gradient.dtype == dtype and logprobs.dtype == (torch.float64 if near < 1e-9 else torch.float32)
        assert float((gradient - wanted).abs().max()) < near
        assert float((logprobs - chosen).abs().max()) < max(near, 4 * near * (dtype == torch.bfloat16))
        assert float((entropy + (expected.exp() * expected).sum(-1)).abs().max()) < 2 * near
        assert not entropy.requires_grad


def test_one_pass_over_logits_that_do_not_lie_row_by_row() -> None:
    logits = torch.randn(4, 3, 11, generator=generator()).transpose(0, 1)
    ids = torch.randint(11, (3, 4), generator=generator(1))
    gradients = []
    for inputs in (logits, logits.contiguous()):
        inputs = inputs.detach().requires_grad_()
        gradients.append(torch.autograd.grad(ops.token_logprobs(inputs, ids).sum(), inputs)[0])
    # each is p - 1[chosen]: at most 1, after a sum of 11 exponentials
    torch.testing.assert_close(gradients[0], gradients[1], atol=16 * torch.finfo(torch.float32).eps, rtol=0)


def test_one_pass_over_logits_of_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [1.0, -torch.inf, -torch.inf]], requires_grad=True)
    logprobs, entropy = ops.logprobs_and_entropy(logits, torch.tensor([0, 0]))
    logprobs.sum().backward()
    assert torch.allclose(logprobs, torch.tensor([0.5, 1.0]).log()) and torch.allclose(
        entropy, torch.tensor([2.0, 1.0]).log()
    )
    assert torch.equal(logits.grad, torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]]))


# --- groups of rows


def test_groups_by_tokens_hold_every_row_once_and_little_padding() -> None:
    lengths = torch.tensor([5, 90, 7, 40, 6, 41, 5, 300])
    groups = [group.tolist() for group in token_groups(lengths, 100)]
    assert groups == [[7], [1], [5, 3], [2, 4, 0, 6]]
