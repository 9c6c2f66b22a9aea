"""The metrics of step 3 by their meaning in docs/metrics.md, in plain Python."""

import math
from collections.abc import Sequence
from typing import Any

from tests.options.reference_credit import Row, Scored

Metrics = dict[str, float]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def deviation(numbers: Sequence[float]) -> float:
    return math.sqrt(mean([(x - mean(numbers)) ** 2 for x in numbers]))


def name_of(spec: str) -> str:
    """How a reward source is logged."""
    return spec.partition(",")[0].rpartition("/")[2]


def named(who: str, metrics: Metrics) -> Metrics:
    """What both engines report, with a prefix; the rate of a head is that of the values."""
    names = {name: f"{who}_{name}" for name in ("loss", "grad_norm", "learning_rate")}
    names["learning_rate_of_head"] = "value_learning_rate"
    return {names.get(name, name): value for name, value in metrics.items()}


def averaged(steps: list[Metrics]) -> Metrics:
    """Means over the optimizer steps of an iteration, what the first of them had, and how many there were."""
    for step in steps:
        if "ratio_square" in step:
            step["ratio_std"] = math.sqrt(max(0.0, step.pop("ratio_square") - (step["ratio_mean"] - 1) ** 2))
    first = {f"first_{name}": steps[0][name] for name in ("approx_kl", "ratio_std") if name in steps[0]}
    return {name: mean([step[name] for step in steps]) for name in steps[0]} | first | {"optimizer_steps": len(steps)}


def rollout_metrics(o: dict[str, Any], scored: Scored, plain: Row) -> Metrics:
    """What an option changes; tests/step3_ppo/test_metrics.py has the others by hand. plain: the scores before they
    were changed for the algorithm"""
    gaps = [math.fsum(old) - math.fsum(ref) for old, ref in zip(scored.old, scored.ref, strict=True)]
    metrics = {"kl": mean(gaps), "score": mean(plain), "score_std": deviation(plain)}
    if o["score_clip"] is not None or o["use_score_scaling"]:
        metrics |= {"shaped_score": mean(scored.scores), "shaped_score_std": deviation(scored.scores)}
    if o["score_clip"] is not None:
        metrics["score_at_clip"] = mean([float(abs(s) >= o["score_clip"] * (1 - 1e-6)) for s in scored.scores])
    return metrics


def compared(before: dict[str, Any], after: dict[str, Any]) -> Metrics:
    """What a run reports of its held-out prompts."""
    scored: Scored = after["scored"]
    metrics = {
        "eval_score_before": mean(before["scored"].scores),
        "eval_score": mean(scored.scores),
        "eval_kl": mean([sum(p) - sum(q) for p, q in zip(scored.old, scored.ref, strict=True)]),
        "eval_response_length": mean([len(row) for row in scored.old]),
        "eval_ended": after["ended"],
    }
    for name, one in {"eval_ref_nll_before": before, "eval_ref_nll": after}.items():
        metrics[name] = -mean([p for row in one["scored"].ref for p in row])
    if after["judge"] is not None:
        metrics |= {"eval_judge_before": mean(before["judge"]), "eval_judge": mean(after["judge"])}
    return metrics
