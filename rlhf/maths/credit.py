"""From scores to rewards, advantages and returns: pure functions over a batch of responses.

Shapes as in rlhf.types: B responses, T response tokens, mask [B, T] True on the tokens that the policy sampled.
"""

import torch
from torch import Tensor

from rlhf.maths.ops import at_least_fp32, zero_off_mask

EPSILON = 1e-4
"""added to the standard deviation by which scores are divided, as in TRL: equal scores are no division by 0"""


def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
) -> Tensor:
    """Per-token rewards: the KL penalty at every token, the score once, at the last token of the mask.

        reward_t = -kl_coef * (logprobs_t - ref_logprobs_t) + [t is the last of the mask] * score

    Ziegler et al. 2019 (arXiv 1909.08593, eq. 2), InstructGPT (arXiv 2203.02155, eq. 2). Only this estimate of the KL
    (k1) is a reward whose policy gradient is that of the KL; that of k3 lacks the gradient of the estimate itself, and
    near the reference nothing is left.
    scores [B]; logprobs, ref_logprobs, mask [B, T] -> [B, T], 0 off the mask.
    The row of a response with an empty mask is zeros.
    """
    log_ratio = at_least_fp32(logprobs) - at_least_fp32(ref_logprobs)
    penalty = zero_off_mask(-kl_coef * log_ratio, mask)
    last = mask & (mask.long().cumsum(1) == mask.sum(1, keepdim=True))
    return penalty + zero_off_mask(scores.to(penalty.dtype).unsqueeze(1).expand_as(penalty), last)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (advantages, returns), both [B, T], 0 off the mask.

        delta_t     = reward_t + gamma * V_{t+1} - V_t
        advantage_t = delta_t + gamma * lam * advantage_{t+1}
        return_t    = advantage_t + V_t

    arXiv 1506.02438, eq. 11-12 and 16. t + 1 is the next token of the mask; after the last one the
    value is 0, for a response cut at T as for one that ended. Nothing is whitened here.
    rewards, values, mask [B, T].
    """
    rewards, values = at_least_fp32(rewards), at_least_fp32(values)
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    columns = []
    for reward, value, in_mask in reversed(list(zip(rewards.unbind(1), values.unbind(1), mask.unbind(1), strict=True))):
        delta = reward + gamma * next_value - value
        advantage = torch.where(in_mask, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(in_mask, value, next_value)
        columns.append(advantage)
    advantages = zero_off_mask(torch.stack(columns[::-1], dim=1), mask)
    return advantages, advantages + zero_off_mask(values, mask)


def on_every_token(values: Tensor, mask: Tensor) -> Tensor:
    """The number of each response [B] on all its tokens [B, T], 0 off the mask."""
    return zero_off_mask(at_least_fp32(values).unsqueeze(1).expand(mask.shape), mask)


def leave_one_out(values: Tensor, group: int) -> Tensor:
    """Each response's value minus the mean of the others in its group. values [B], groups of neighbours.

        A_i = R_i - 1 / (K - 1) * sum_{j != i} R_j

    RLOO (arXiv 2402.14740, eq. 7). K = group >= 2, B a multiple of it.
    """
    grouped = _grouped(values, group)
    others_mean = (grouped.sum(1, keepdim=True) - grouped) / (group - 1)
    return (grouped - others_mean).reshape(-1).to(at_least_fp32(values).dtype)


def group_relative(values: Tensor, group: int, scale: bool) -> Tensor:
    """Each response's value minus its group's mean, divided by its standard deviation if `scale`. values [B].

        A_i = (r_i - mean(r)) / (std(r) + 1e-4)

    GRPO (arXiv 2402.03300, section 4.1.2), the standard deviation unbiased; a group of equal values gives 0.
    """
    grouped = _grouped(values, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    centred = centred / (grouped.std(1, keepdim=True) + EPSILON) if scale else centred
    return centred.reshape(-1).to(at_least_fp32(values).dtype)


def _grouped(values: Tensor, group: int) -> Tensor:
    """Groups [B / group, group] in float64, where the mean of equal float32 values is exactly that value."""
    assert group >= 2 and len(values) % group == 0, f"{len(values)} responses in groups of {group}"
    return values.double().reshape(-1, group)
