"""The metrics of an iteration: masked numbers over the responses of all ranks. docs/metrics.md explains each.

Everything is added up in float64 and over ranks before anything is divided, so that the result depends neither on
padding nor on how many ranks share the responses.
"""

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.maths import ops
from rlhf.rewards import NO_SCORE
from rlhf.types import Credit, Metrics, ScoredRollout
from step3_ppo.config import ScoreOptions

EQUAL = 1e-6
"""difference of scores below which they are equal: rounding of a reward model in fp32 is of that size"""
ID_BASE = 1 << 31
"""Token ids are below this, so that two of them make one int64."""


def rollout_metrics(
    rollout: ScoredRollout,
    by_source: Mapping[str, Tensor] | None = None,
    disagreement: Tensor | None = None,
) -> Metrics:
    """Numbers of a scored rollout, means over the responses of all ranks. KL in nats per response.

    by_source: scores [B] of each source by its name, the same names on every rank; `score_NAME` and `score_NAME_std`,
    of the responses to which the source applies. `unscored`: share of them to which no source does, if there are some.
    disagreement: standard deviation over the members of an ensemble [B]; its mean is `score_disagreement`.
    """
    with_std = {"score": rollout.scores, "response_length": rollout.lengths}
    of_sources = {f"score_{name}": scores for name, scores in (by_source or {}).items()}
    applies = {name: scores != NO_SCORE for name, scores in of_sources.items()}
    with_std |= {name: scores.where(applies[name], 0.0) for name, scores in of_sources.items()}
    repeated, grams = _repeated(rollout, 4)
    columns = {
        "rows": torch.ones(len(rollout)),
        **{f"{name} rows": responses for name, responses in applies.items()},
        "unscored": ~torch.stack([*applies.values()]).any(0) if applies else torch.zeros(1),
        **_kl(rollout),
        **with_std,
        **{f"{name} squared": values.double().square() for name, values in with_std.items()},
        "score x length": rollout.scores.double() * rollout.lengths,
        "prompt_length": rollout.prompt_mask.sum(1),
        "ended": rollout.ended,
        "truncated": ~rollout.ended,
        "repeated": repeated,
        "grams": grams,
    }
    if disagreement is not None:
        columns["score_disagreement"] = disagreement
    totals = collectives.sum_over_ranks(torch.stack([value.double().sum().cpu() for value in columns.values()]))
    sums = dict(zip(columns, totals.tolist(), strict=True))
    rows, repeated_grams, all_grams = (sums.pop(name) for name in ("rows", "repeated", "grams"))
    counts = {name: sums.pop(f"{name} rows") for name in applies}
    means = {n: total / max(counts.get(n.removesuffix(" squared"), rows), 1.0) for n, total in sums.items()}
    if all(count == rows for count in counts.values()):
        del means["unscored"]
    product = means.pop("score x length")
    variances = {name: _variance(means[name], means.pop(f"{name} squared")) for name in with_std}
    means["sampling_mismatch"] = sums["sampling_mismatch"] / max(sums["response_length"], 1.0)
    covariance = product - means["score"] * means["response_length"]
    return {
        **means,
        **{f"{name}_std": math.sqrt(variance) for name, variance in variances.items()},
        "score_length_correlation": _ratio(covariance, math.sqrt(variances["score"] * variances["response_length"])),
        "repeated_4_grams": repeated_grams / max(all_grams, 1.0),
        "distinct_1": _distinct(rollout, 1),
        "distinct_2": _distinct(rollout, 2),
        "tokens": sums["prompt_length"] + sums["response_length"],
    }


def group_metrics(scores: Tensor, group: int) -> Metrics:
    """Of the scores [B] of groups of neighbours, over those of all ranks: `equal_groups`, the share of groups whose
    scores are equal, from which an algorithm with the group's mean as baseline learns nothing; `group_score_std`, the
    mean of the groups' standard deviations (biased). Nothing for groups of one."""
    if group == 1:
        return {}
    groups = scores.double().view(-1, group)
    columns = torch.stack([torch.ones(len(groups)), equal(groups), groups.std(1, correction=0)])
    count, same, deviations = collectives.sum_over_ranks(columns.double().sum(1)).tolist()
    return {"equal_groups": same / count, "group_score_std": deviations / count}


def equal(groups: Tensor) -> Tensor:
    """Whether the scores of each group are equal, bool [G]. groups [G, group]"""
    return groups.amax(1) - groups.amin(1) <= EQUAL


def _kl(rollout: ScoredRollout) -> dict[str, Tensor]:
    """KL to the reference, summed over each response [B], and how far training and sampling log-probs are apart."""
    sampled, old, ref = (
        ops.zero_off_mask(x.double(), rollout.mask)
        for x in (rollout.sampled_logprobs, rollout.logprobs, rollout.ref_logprobs)
    )
    return {
        "kl": ops.kl_estimate(old, ref, "k1").sum(1),
        "kl_k3": ops.kl_estimate(old, ref, "k3").sum(1),
        "sampling_mismatch": (sampled - old).abs().sum(1),
    }


def kl_and_deviation(rollout: ScoredRollout) -> tuple[float, float]:
    """Mean KL of a response to the reference, nats, and the standard deviation of scores, over those of all ranks."""
    scores = rollout.scores.double()
    columns = [torch.ones_like(scores), _kl(rollout)["kl"].to(scores), scores, scores.square()]
    rows, kl, total, squares = collectives.sum_over_ranks(torch.stack(columns).sum(1).cpu()).tolist()
    return kl / rows, math.sqrt(_variance(total / rows, squares / rows))


def shaped_metrics(scores: Tensor, options: ScoreOptions) -> Metrics:
    """Of the scores [B] that the algorithm gets, where the options change them: `shaped_score`, its standard deviation,
    and with `score_clip` the share of scores at that limit, `score_at_clip`. Means over the responses of all ranks."""
    clip = options.score_clip
    if clip is None and not options.use_score_scaling:
        return {}
    at_clip = scores.abs() >= (math.inf if clip is None else clip * (1 - 1e-6))
    columns = torch.stack([torch.ones_like(scores), scores, scores.square(), at_clip]).double()
    rows, total, squares, clipped = collectives.sum_over_ranks(columns.sum(1)).tolist()
    metrics = {"shaped_score": total / rows, "shaped_score_std": math.sqrt(_variance(total / rows, squares / rows))}
    return metrics if clip is None else metrics | {"score_at_clip": clipped / rows}


def credit_metrics(rollout: ScoredRollout, credit: Credit) -> Metrics:
    """Mean and standard deviation of advantages, returns and values over the tokens of all ranks.

    `advantage_peak` is max A^2 / sum A^2, the share of one token in the squares of all advantages; 0 if all are 0.
    With a critic also `raw_advantage_*`, which is returns - values: the advantages before they were whitened, unless
    the returns have a lambda of their own; and
        explained_variance = 1 - var(returns - values) / var(returns)
    1 = the critic predicts every return, 0 = no better than their mean, NaN = the returns do not vary. It does not see
    a constant error, which is in
        critic_error = mean (returns - values)^2 / var(returns)
    """
    mask = rollout.mask
    columns = {"advantage": credit.advantages.double(), "return": credit.returns.double()}
    if rollout.values is not None:
        values = rollout.values.double()
        columns |= {"value": values, "raw_advantage": columns["return"] - values}
    moments = collectives.sum_over_ranks(torch.stack([ops.moments(x, mask) for x in columns.values()]))
    metrics: Metrics = {}
    variances: Metrics = {}
    for name, (count, total, square) in zip(columns, moments.tolist(), strict=True):
        mean = total / max(count, 1.0)
        variances[name] = _variance(mean, square / max(count, 1.0))
        metrics |= {f"{name}_mean": mean, f"{name}_std": math.sqrt(variances[name])}
    squares = dict(zip(columns, moments[:, 2].tolist(), strict=True))
    largest = ops.zero_off_mask(credit.advantages.double(), mask).abs().max().item()
    peak = collectives.max_over_ranks([largest])[0] ** 2
    metrics["advantage_peak"] = peak / squares["advantage"] if peak > 0 else 0.0
    if "raw_advantage" in variances:
        metrics["explained_variance"] = 1 - _ratio(variances["raw_advantage"], variances["return"])
        mean_square = squares["raw_advantage"] / max(moments[0, 0].item(), 1.0)
        metrics["critic_error"] = _ratio(mean_square, variances["return"])
    return metrics


class Clock:
    """Seconds of the phases of an iteration, on this rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        """Begin an iteration."""
        self.seconds, self._last = {}, time.monotonic()

    def lap(self, name: str) -> None:
        """Add the time since the last call to that of the phase `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def speed(tokens: float, seconds: Mapping[str, float]) -> Metrics:
    """Seconds of each phase of an iteration on this rank and of all phases; tokens of all ranks per second.

    tokens: of prompts and responses, padding not counted, each once however often it went through a model.
    """
    total = sum(seconds.values())
    phases = {f"seconds_{name}": value for name, value in seconds.items()}
    return phases | {"seconds_iteration": total, "tokens_per_second": _ratio(tokens, total)}


def _variance(mean: float, mean_square: float) -> float:
    """Biased variance; exactly 0 where only rounding is left of it."""
    variance = mean_square - mean * mean
    return variance if variance > ops.EMPTY_VARIANCE * mean_square else 0.0


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


def _distinct(rollout: ScoredRollout, n: int) -> float:
    """Share of different n-grams among all n-grams of all ranks (Li et al. 2016, arXiv 1510.03055); n is 1 or 2."""
    assert n in (1, 2), f"_distinct: {n=}, expected 1 or 2"
    grams, _ = _grams(rollout, n)
    keys = grams[:, 0] if n == 1 else grams[:, 0] * ID_BASE + grams[:, 1]
    by_rank = collectives.gather_replicas((keys.unique().cpu(), len(keys)))
    different = len(torch.cat([unique for unique, _ in by_rank]).unique())
    return different / max(1, sum(count for _, count in by_rank))


def _repeated(rollout: ScoredRollout, n: int) -> tuple[Tensor, Tensor]:
    """Counts of repeated n-grams within a response and of all n-grams (seq-rep-n, arXiv 1908.04319)."""
    grams, labels = _grams(rollout, n)
    for column in grams.unbind(1):
        # Renumbered after each token, so that label and id always fit one int64; unique(dim=0) is 20 times slower.
        labels = torch.unique(labels * ID_BASE + column, return_inverse=True)[1]
    count = torch.tensor(len(labels))
    return count - len(labels.unique()), count


def _grams(rollout: ScoredRollout, n: int) -> tuple[Tensor, Tensor]:
    """All n-grams [N, n] that lie on the mask, and the row of each [N]."""
    missing = max(0, n - rollout.mask.shape[1])
    ids, mask = (torch.nn.functional.pad(x, (0, missing)) for x in (rollout.response_ids, rollout.mask))
    on_mask = mask.unfold(1, n, 1).all(2)
    return ids.unfold(1, n, 1)[on_mask], on_mask.nonzero()[:, 0]
