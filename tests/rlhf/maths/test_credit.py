"""Rewards and advantages against numbers worked by hand, a float64 double sum, and invariants."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.maths import credit, ops

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ragged(width: int) -> Tensor:
    """One row of each length 1 .. width: bool [width, width]."""
    return torch.ones(width, width).tril().bool()


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    return ops.whiten(x, mask, *ops.mean_var(ops.moments(x, mask)))


# Rewards


def test_kl_rewards_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -9.0], [-0.5, -9.0, -9.0, -9.0], [-9.0] * 4, [-1.0] * 4])
    ref_logprobs = torch.tensor([[-2.0, -1.0, -3.5, -1.0], [-0.5, -1.0, -1.0, -1.0], [-1.0] * 4, [-3.0] * 4])
    rewards = credit.kl_rewards(torch.tensor([5.0, -2.0, 7.0, 1.0]), logprobs, ref_logprobs, MASK, kl_coef=0.1)
    expected = [[-0.1, 0.1, 4.95, 0.0], [-2.0, 0.0, 0.0, 0.0], [0.0] * 4, [-0.2, -0.2, -0.2, 0.8]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def double_sum(rewards: Tensor, values: Tensor, length: int, gamma: float, lam: float) -> list[float]:
    """advantage_t = sum_l (gamma lam)^l delta_{t+l}, term by term in float64; V = 0 past the end."""
    r, v = rewards.double().tolist()[:length], [*values.double().tolist()[:length], 0.0]
    deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_gae_equals_the_double_sum(gamma: float, lam: float) -> None:
    width = 40
    rewards, values, mask = normal(width, width), normal(width, width, seed=1), ragged(width)
    advantages, returns = credit.gae(rewards, values, mask, gamma, lam)
    for row in range(width):
        expected = double_sum(rewards[row], values[row], row + 1, gamma, lam)
        assert advantages[row, : row + 1].tolist() == pytest.approx(expected, abs=1e-5)
        targets = [a + v for a, v in zip(expected, values[row].tolist(), strict=False)]
        assert returns[row, : row + 1].tolist() == pytest.approx(targets, abs=1e-5)
        assert not advantages[row, row + 1 :].any() and not returns[row, row + 1 :].any()


def test_padding_on_either_side_and_holes_change_no_bit() -> None:
    rewards, values, mask = normal(5, 5), normal(5, 5, seed=1), ragged(5)
    clean = credit.gae(rewards, values, mask, 0.99, 0.95)
    for columns in ([2, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0, 2, 3, 6, 7]):
        wide_rewards, wide_values = torch.full((5, 8), math.nan), torch.full((5, 8), math.inf)
        wide_mask = torch.zeros(5, 8, dtype=torch.bool)
        wide_rewards[:, columns], wide_values[:, columns], wide_mask[:, columns] = rewards, values, mask
        for wide, narrow in zip(credit.gae(wide_rewards, wide_values, wide_mask, 0.99, 0.95), clean, strict=True):
            assert torch.equal(wide[:, columns], narrow)
            assert not wide[~wide_mask].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float16])
def test_integers_such_as_lengths_are_not_truncated(dtype: torch.dtype) -> None:
    """By hand: of 1, 8, 3, 4 each minus the mean of the others; in pairs, half the distance over distance / sqrt(2)."""
    lengths, half = torch.tensor([1, 8, 3, 4], dtype=dtype), math.sqrt(0.5)
    assert credit.leave_one_out(lengths, 4).tolist() == pytest.approx([-4, 16 / 3, -4 / 3, 0], abs=1e-6)
    assert credit.group_relative(lengths, 2, scale=False).tolist() == [-3.5, 3.5, -0.5, 0.5]
    assert credit.group_relative(lengths, 2, scale=True).tolist() == pytest.approx([-half, half, -half, half], abs=2e-4)
    white = whitened(lengths, torch.ones(4, dtype=torch.bool))
    assert white.tolist() == pytest.approx([-3 / math.sqrt(6.5), 4 / math.sqrt(6.5), -1 / math.sqrt(6.5), 0], abs=1e-6)


def _credited(garbage: float) -> tuple[Tensor, ...]:
    """Everything from scores to whitened advantages, with `garbage` wherever the mask is False."""
    soiled = [normal(4, 4, seed=seed).masked_fill(~MASK, garbage) for seed in range(3)]
    rewards = credit.kl_rewards(normal(4), soiled[0], soiled[1], MASK, 0.1)
    advantages, returns = credit.gae(rewards, soiled[2], MASK, 0.99, 0.95)
    return rewards, advantages, returns, whitened(advantages, MASK)


def test_garbage_after_the_end_changes_no_bit() -> None:
    clean = _credited(0.0)
    for garbage in GARBAGE:
        assert all(torch.equal(a, b) for a, b in zip(clean, _credited(garbage), strict=True))


def test_low_precision_input_gives_float32_credit() -> None:
    half = normal(4, 4).bfloat16()
    rewards = credit.kl_rewards(normal(4).bfloat16(), half, half, MASK, 0.1)
    assert {x.dtype for x in (rewards, *credit.gae(rewards, half, MASK, 1.0, 0.95))} == {torch.float32}


# Invariants of the whole road from score to whitened advantage


# --- groups of responses to one prompt


def test_leave_one_out_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; the second group likewise
    expected = torch.tensor([-3.0, -1.5, 4.5, -1.5, -1.5, 3.0])
    torch.testing.assert_close(credit.leave_one_out(values, 3), expected)
    with pytest.raises(AssertionError, match="6 responses in groups of 4"):
        credit.leave_one_out(values, 4)


def test_group_relative_by_hand() -> None:
    values = torch.tensor([1.0, 3.0, 5.0, 5.0, 7.0, 1.0])
    centred = torch.tensor([-1.0, 1.0, 0.0, 0.0, 3.0, -3.0])
    torch.testing.assert_close(credit.group_relative(values, 2, scale=False), centred)
    # deviations sqrt(2), 0 and sqrt(18), unbiased: of two numbers their distance over sqrt(2)
    scaled = centred / (torch.tensor([2.0, 2.0, 0.0, 0.0, 18.0, 18.0]).sqrt() + 1e-4)
    torch.testing.assert_close(credit.group_relative(values, 2, scale=True), scaled)


@pytest.mark.parametrize("value", [1000.1, -0.1, 1 / 3])
@pytest.mark.parametrize("group", [2, 3, 7])
def test_equal_values_that_fp32_cannot_hold_are_equal_to_their_mean(value: float, group: int) -> None:
    """Their mean rounds in fp32; over a deviation of 1e-4 that would be a third of an advantage."""
    values = torch.full((2 * group,), value)
    for result in (
        credit.group_relative(values, group, scale=True),
        credit.group_relative(values, group, scale=False),
        credit.leave_one_out(values, group),
    ):
        assert torch.equal(result, torch.zeros(2 * group)) and result.dtype == torch.float32


def test_the_number_of_a_response_is_on_all_its_tokens() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    expected = torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
    assert torch.equal(credit.on_every_token(torch.tensor([2.0, 5.0, -1.0]), mask), expected)
