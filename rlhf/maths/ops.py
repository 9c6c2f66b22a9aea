"""Tensor operations that every stage shares: masked sums, log-probabilities, moments, KL estimates.

Pure functions. A mask is a bool tensor, True where an element counts. Values off the mask, NaN and
infinity included, change no bit of a result or of a gradient.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
Count = float | Tensor

EMPTY_VARIANCE = 1e-12
"""A variance below this share of the mean square is rounding error and counts as 0."""


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in float32; float32 and float64 do not change. Integers, such as lengths, would truncate every mean."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def zero_off_mask(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with exact zeros off the mask, in value and in gradient. x, mask [...], same shape."""
    # Not x * mask: NaN * 0 is NaN, and so is the gradient behind an infinity.
    return x.masked_fill(~mask, 0.0)


def positions(mask: Tensor) -> Tensor:
    """Position of every token among the real tokens of its row. mask [B, S] -> long [B, S].

    positions_s = sum_{j < s} mask_j, which does not depend on the number of pads to the left of a token.
    """
    mask = mask.long()
    return mask.cumsum(1) - mask


def flush_left(x: Tensor, mask: Tensor) -> Tensor:
    """The tokens in each row's mask, moved to column 0 and the columns after it, then padding up to the longest row.

    Token s of a row moves to column `positions(mask)[s]`. x, mask [B, S] -> [B, at most S].
    A causal model needs no mask for such rows: all padding comes after the tokens.
    """
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return x.gather(1, order[:, : int(mask.sum(1).max())])


def last_index(mask: Tensor) -> Tensor:
    """Index of the last True of each row. mask [B, S] -> long [B]. No row may be empty."""
    assert bool(mask.any(1).all()), "last_index: a row of the mask has no True"
    return (mask * torch.arange(mask.size(1), device=mask.device)).amax(1)


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `ids`. logits [..., V], ids long [...] -> [...], nats.

    Computed in float32 at least: in bf16 the mean error at V = 50k is 0.018 and the largest 0.060.
    """
    return _logprobs_and_entropy(logits, ids, temperature, False)[0]


def logprobs_and_entropy(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(`token_logprobs`, `entropy` without a gradient), from one pass over the logits.

    Neither the forward nor the backward pass allocates the log-softmax or a float32 copy of all logits, which would be
    the largest tensor of a step in bf16. On a CPU, where memory bandwidth is the limit, it is twice as fast as separate
    operations.
    """
    return _logprobs_and_entropy(logits, ids, temperature, True)


def _logprobs_and_entropy(logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    assert temperature > 0, f"temperature {temperature}, expected > 0"
    return _LogprobsAndEntropy.apply(logits, ids, temperature, with_entropy)


CACHED = 2**22
"""logits that are processed together on a CPU, as many as its cache holds; on other devices 16 times as many"""


def logits_at_once(device_type: str) -> int:
    """How many logits are converted to fp32 together on a kind of device."""
    return CACHED * (1 if device_type == "cpu" else 16)


class _LogprobsAndEntropy(torch.autograd.Function):
    """With z = logits / temperature and p = softmax(z): log p_i = z_i - log sum_v exp z_v, whose gradient is
    (1[v = i] - p_v) / temperature, and H = -sum_v p_v log p_v."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        logprobs, sums, entropies = [], [], [torch.zeros(0, device=logits.device)]
        for block, block_ids in _row_blocks(logits, ids):
            z = tempered(block, temperature)
            total = z.logsumexp(-1)
            logprobs.append(z.gather(-1, block_ids[:, None]).squeeze(-1) - total)
            sums.append(total)
            if with_entropy:
                # A logit of -inf has probability 0 and must contribute 0; 0 * -inf would be NaN.
                log_p = (z - total[:, None]).clamp_(min=torch.finfo(z.dtype).min)
                entropies.append(-torch.linalg.vecdot(log_p.exp(), log_p))
        ctx.save_for_backward(logits, ids, torch.cat(sums))
        ctx.temperature = temperature
        entropy_values = torch.cat(entropies).clamp(min=0).view(ids.shape if with_entropy else 0)
        ctx.mark_non_differentiable(entropy_values)
        return torch.cat(logprobs).view(ids.shape), entropy_values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ids, sums = ctx.saved_tensors
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        scaled = gradient.reshape(-1, 1) / ctx.temperature
        start = 0
        for (block, block_ids), (out, _) in zip(_row_blocks(logits, ids), _row_blocks(result, ids), strict=True):
            rows = slice(start, start := start + len(block))
            change = (tempered(block, ctx.temperature) - sums[rows, None]).exp_().mul_(-scaled[rows])
            out.copy_(change.scatter_add_(-1, block_ids[:, None], scaled[rows]))
        return result, None, None, None


def _row_blocks(logits: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of rows: logits [n, V] and their ids [n], over all leading dimensions."""
    size = logits.shape[-1]
    rows = max(1, logits_at_once(logits.device.type) // size)
    return zip(logits.reshape(-1, size).split(rows), ids.reshape(-1).split(rows), strict=True)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H = -sum_v p_v log p_v of softmax(logits / temperature). [..., V] -> [...], nats, never negative.

    A logit of -inf (a token that cannot be chosen) contributes 0.
    """
    logprobs = tempered(logits, temperature).log_softmax(-1)
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return -(logprobs.exp() * finite).sum(-1)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """`logits / temperature` in float32 at least, same shape."""
    assert temperature > 0, f"temperature {temperature}, expected > 0"
    logits = at_least_fp32(logits)
    return logits if temperature == 1.0 else logits / temperature


def masked_mean(x: Tensor, mask: Tensor, count: Count | None = None) -> Tensor:
    """Sum over the mask, divided by `count`. x, mask [...], same shape -> scalar.

    count: tokens of the whole optimizer step, over all micro-batches and ranks, so that the results of
    micro-batches add up to the mean of the step; by default the tokens of this mask. At least 1.
    """
    return zero_off_mask(x, mask).sum() / at_least_one(mask.sum() if count is None else count)


def at_least_one(count: Count) -> Count:
    """The count, or 1 if it is smaller: the loss of an empty step is then 0, not NaN."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1.0)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """(count, sum, sum of squares) over the mask: float64 [3]. The moments of micro-batches and ranks add up."""
    values = zero_off_mask(x, mask).double()
    return torch.stack([mask.sum().double(), values.sum(), values.square().sum()])


def mean_var(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (divided by count) from summed moments; (0, 0) if count is 0.

    The variance is never negative, and exactly 0 if it is within rounding error of 0.
    """
    count, total, squares = moments.unbind()
    mean, mean_square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = mean_square - mean.square()
    return mean, torch.where(variance > EMPTY_VARIANCE * mean_square, variance, 0.0)


def whiten(x: Tensor, mask: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), 0 off the mask. x, mask [...], same shape.

    mean, var: scalars of `mean_var`, over all ranks. With one token, or equal tokens, the result is zero, not NaN.
    Subtracts in float64, so that constant float32 input gives exact zeros.
    """
    return zero_off_mask(((x.double() - mean) * torch.rsqrt(var + 1e-8)).to(at_least_fp32(x).dtype), mask)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator) -> Tensor:
    """Per-sample estimate of KL(policy || reference) from samples of the policy. [...] -> [...], nats.

    With d = logprobs - ref_logprobs (J. Schulman, "Approximating KL divergence", 2020):
        k1 = d                  unbiased, either sign
        k2 = d^2 / 2            biased, >= 0; as a loss, its gradient is that of the KL
        k3 = exp(-d) - 1 + d    unbiased, >= 0
    """
    d = logprobs - ref_logprobs
    match kind:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(-d) + d
    raise AssertionError(f"kl_estimate: no estimator {kind!r}, expected k1, k2 or k3")
