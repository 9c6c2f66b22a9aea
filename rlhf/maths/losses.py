"""The losses of the three stages: pure functions that return (loss, metrics).

`count` is the number of elements (tokens, or pairs) of the whole optimizer step, over all its
micro-batches and ranks. Loss and metrics are sums divided by it, so the loss and every metric of a step
is the sum over its micro-batches and ranks. An engine that averages gradients over ranks or
accumulated micro-batches must multiply the loss by their number first.
Metrics are detached scalars. Values off a mask do not enter loss, metrics or gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.maths.ops import Count, KLEstimator, at_least_fp32, at_least_one, kl_estimate, masked_mean, zero_off_mask

Loss = tuple[Tensor, dict[str, Tensor]]

LOG_RATIO = 20.0
"""bound of |log ratio| of a policy"""
MAX_K3 = 10.0
"""nats; bound of a token's k3 as a loss. Its gradient is exp(ref_logprobs - logprobs), 2e4 at a distance of 10."""


def token_nll(logprobs: Tensor, mask: Tensor, count: Count, weight: Tensor | None = None) -> Loss:
    """Negative log-likelihood: loss = -sum_mask weight logprobs / count. logprobs, mask [B, S]; weight [B], 1 if None.

    Metrics: nll, nats per token; perplexity is exp of its sum over micro-batches and ranks.
    """
    nll = -at_least_fp32(logprobs)
    loss = masked_mean(nll if weight is None else weight.unsqueeze(1) * nll, mask, count)
    return loss, {"nll": loss.detach()}


def pairwise_logistic(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    centering: float = 0.0,
    count: Count | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Bradley-Terry loss of B pairs of sequence scores. chosen, rejected, margin, weight [B].

        x = r_c - r_r - margin
        loss = sum_b weight * [-(1 - e) log sigmoid(x) - e log sigmoid(-x) + centering * (r_c + r_r)^2] / count

    InstructGPT (arXiv 2203.02155, eq. 1): each pair of K ranked responses has the weight 1 / C(K, 2), and count is
    the number of prompts. margin: Llama 2 (arXiv 2307.09288, eq. 2); centering: Eisenstein et al. 2023 (arXiv
    2312.09244), 0.01 is usual. label_smoothing e < 1/2, the share of labels that are assumed to be swapped: Mitchell
    2023, "A note on DPO with noisy preferences"; the loss of a pair is least at x = log((1 - e) / e), not at infinity.
    By default weights are 1 and count is B.
    """
    chosen, rejected = at_least_fp32(chosen), at_least_fp32(rejected)
    count = at_least_one(float(chosen.numel()) if count is None else count)
    gap = chosen - rejected
    logit = gap if margin is None else gap - margin
    losses = -F.logsigmoid(logit)
    if label_smoothing:
        losses = losses + label_smoothing * logit  # log sigmoid(x) - log sigmoid(-x) = x
    losses = losses + centering * (chosen + rejected).square()
    return (losses if weight is None else weight * losses).sum() / count


def pair_metrics(
    chosen: Tensor, rejected: Tensor, count: Count | None = None, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Of B pairs of scores, with the weights and the count of `pairwise_logistic`: accuracy (a tie counts one half) and
    margin (mean r_c - r_r)."""
    gap = (at_least_fp32(chosen) - at_least_fp32(rejected)).detach()
    count = at_least_one(float(gap.numel()) if count is None else count)
    weight = torch.ones_like(gap) if weight is None else weight
    return {
        "accuracy": (weight * (1 + gap.sign()) / 2).sum() / count,
        "margin": (weight * gap).sum() / count,
    }


def token_logistic(
    chosen: Tensor,
    rejected: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    count: Count,
    centering: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The pairwise loss between the t-th tokens of both responses of B pairs, for every t: the mean over pairs of the
    mean over tokens.

        x_t = r_c,t - r_r,t
        loss_t = -(1 - e) log sigmoid(x_t) - e log sigmoid(-x_t) + centering * (r_c,t + r_r,t)^2
        sum_b weight * [mean over mask of loss_t] / count

    chosen, rejected: the scalars at the tokens, [B, S]. mask [B, S]: where both responses have a token and have already
    differed; a pair without such a token has the loss 0. weight [B], count, centering and label_smoothing e as of
    `pairwise_logistic`. The loss of DeepSpeed-Chat's reward model, which averages over the tokens of the longer side.
    """
    chosen, rejected = (zero_off_mask(at_least_fp32(x), mask) for x in (chosen, rejected))
    gap = chosen - rejected
    losses = label_smoothing * gap - F.logsigmoid(gap)  # log sigmoid(x) - log sigmoid(-x) = x
    losses = losses + centering * (chosen + rejected).square()
    means = zero_off_mask(losses, mask).sum(1) / mask.sum(1).clamp(min=1)
    return (means if weight is None else weight * means).sum() / count


def clipped_policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: tuple[float, float],
    count: Count,
    dual_clip: float | None = None,
) -> Loss:
    """PPO's clipped surrogate, negated. All tensors [B, T]; only `logprobs` carries a gradient.

        loss = sum_mask max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)) / count

    with ratio = exp(logprobs - old_logprobs) and (low, high) = cliprange: arXiv 1707.06347, eq. 7, where the two are
    equal, and DAPO (arXiv 2503.14476, eq. 10), where high is larger. With dual_clip c the loss of a token with A < 0 is
    at most -A * c, however likely it has become (arXiv 1912.09729, eq. 5).
    Metrics, means over tokens: approx_kl, the k3 estimate of KL(old || new), never negative;
    clip_fraction, tokens on which the clip binds; ratio_mean; ratio_square, the mean of (ratio - 1)^2; with dual_clip
    dual_clip_fraction, tokens on which that binds.
    """
    logprobs, old_logprobs, advantages = _masked(mask, logprobs, old_logprobs, advantages)
    # An infinite ratio would have a gradient of 0 * inf = NaN.
    logprobs = torch.clamp(logprobs, old_logprobs - LOG_RATIO, old_logprobs + LOG_RATIO)
    ratio = torch.exp(logprobs - old_logprobs)
    free = -advantages * ratio
    low, high = cliprange
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(free, clipped)
    bounded = (
        losses if dual_clip is None else losses.minimum(torch.where(advantages < 0, -advantages * dual_clip, losses))
    )
    with torch.no_grad():
        metrics = {
            "approx_kl": masked_mean(kl_estimate(old_logprobs, logprobs, "k3"), mask, count),
            "clip_fraction": masked_mean((clipped > free).to(ratio.dtype), mask, count),
            "ratio_mean": masked_mean(ratio, mask, count),
            # ratio^2 itself would cancel in fp32 against the square of its mean
            "ratio_square": masked_mean(torch.expm1(logprobs - old_logprobs).square(), mask, count),
        }
        if dual_clip is not None:
            metrics["dual_clip_fraction"] = masked_mean((bounded < losses).to(ratio.dtype), mask, count)
    return masked_mean(bounded, mask, count), metrics


def response_logprobs(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-probs whose ratio to the old ones is, on all tokens of a response, that of the response: [B, T].

        log ratio_i = 1 / n_i * sum_t (logprobs_it - old_logprobs_it)

    GSPO (arXiv 2507.18071, eq. 7), with n_i tokens in the response. 0 off the mask; only `logprobs` carries a gradient.
    """
    logprobs, old_logprobs = _masked(mask, logprobs, old_logprobs)
    log_ratios = (logprobs - old_logprobs).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return zero_off_mask(old_logprobs + log_ratios, mask)


def sampling_ratios(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The ratio of each token's probability in the trainer to that in the sampler, same weights; 1 off the mask. [B, T]

    A loss of tokens that were sampled from another distribution has the right expectation if it is weighed by the ratio
    (importance sampling); min(ratio, cap) bounds its variance (Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training").
    """
    logprobs, sampled_logprobs = _masked(mask, logprobs, sampled_logprobs)
    return torch.exp((logprobs - sampled_logprobs).clamp(-LOG_RATIO, LOG_RATIO))


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: KLEstimator,
    count: Count,
    weights: Tensor | None = None,
) -> Tensor:
    """The mean over tokens of an estimate of the KL to the reference, as a loss: sum_mask w kl_t / count. All [B, T].

    weights w: [B, T] or [B, 1], by default 1.
    The gradient of k2 = (logprobs - ref_logprobs)^2 / 2 on samples of the policy is that of the KL of each token given
    the tokens before it; the gradient of k3 is not (Schulman 2020; arXiv 2506.09477). The KL of whole responses, which
    a penalty in the reward measures, also counts what a token does to the KL of those after it. k3 counts up to MAX_K3,
    and beyond it has no gradient, as in verl and NeMo-RL.
    """
    logprobs, ref_logprobs = _masked(mask, logprobs, ref_logprobs)
    if estimator == "k3":  # an infinite estimate would have a gradient of 0 * inf = NaN
        logprobs = torch.clamp(logprobs, ref_logprobs - LOG_RATIO, ref_logprobs + LOG_RATIO)
    kl = kl_estimate(logprobs, ref_logprobs, estimator)
    kl = kl.clamp(max=MAX_K3) if estimator == "k3" else kl
    return masked_mean(kl if weights is None else weights * kl, mask, count)


def clipped_value(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange: float,
    count: Count,
) -> Loss:
    """The critic's loss, clipped around the old values. All tensors [B, T]; only `values` carries a gradient.

        loss = sum_mask 0.5 * max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2) / count

    As in the PPO of OpenAI baselines (the papers do not have it); cliprange inf turns the clip off.
    Metrics: value_clip_fraction, tokens on which the clip binds.
    """
    values, old_values, returns = _masked(mask, values, old_values, returns)
    # V is clamped, not V - V_old: adding V_old back would round, and count tokens as clipped that are not.
    clipped = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    free_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    binds = (clipped_error > free_error).to(values.dtype)
    loss = masked_mean(0.5 * torch.maximum(free_error, clipped_error), mask, count)
    return loss, {"value_clip_fraction": masked_mean(binds, mask, count)}


def fault_of(loss: object) -> str:
    """What is wrong with the result of a user's loss function; empty if it is a `Loss`."""
    expected = "expected (loss, metrics): a tensor with one number that has a gradient, and a dict of such tensors"
    if not isinstance(loss, tuple) or len(loss) != 2 or not isinstance(loss[1], dict):
        return f"{describe(loss)}, {expected}"
    if not isinstance(loss[0], Tensor) or loss[0].numel() != 1 or not loss[0].requires_grad:
        return f"the loss {describe(loss[0])}, {expected}"
    wrong = [name for name, value in loss[1].items() if not isinstance(value, Tensor) or value.numel() != 1]
    return f"the metric {wrong[0]}: {describe(loss[1][wrong[0]])}, {expected}" if wrong else ""


def describe(value: object) -> str:
    """`a tensor of shape (3,) and torch.float32`, or the type of another value."""
    if not isinstance(value, Tensor):
        return f"a value of type {type(value).__name__}"
    gradient = "" if value.requires_grad else " without a gradient"
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}{gradient}"


def _masked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor in float32 at least, with zeros off the mask before any exp can overflow there."""
    return tuple(zero_off_mask(at_least_fp32(x), mask) for x in tensors)
