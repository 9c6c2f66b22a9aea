"""Named warnings while step 3 runs: what the metrics of an iteration mean, and what to do. Pure functions.

A warning is given once when its condition begins to hold, and again only after the condition has cleared. An iteration
without a metric does not change the conditions that need it.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from pydantic import Field

from rlhf.config import Config

Numbers = dict[str, float]
Rows = Sequence[Mapping[str, float]]
"""Metrics of every iteration so far, the newest last."""


class Limits(Config):
    """The limits beyond which a metric of step 3 gives a warning."""

    start_iterations: int = Field(3, ge=1)
    """iterations at the start; length and entropy are compared with their mean"""
    in_a_row: int = Field(3, ge=1)
    """iterations in a row for which a noisy condition must hold: negative_kl, clip_fraction, score_follows_length"""
    first_ratio: float = Field(1e-3, gt=0)
    """fp32: first_approx_kl, or the std of the first ratio, above this"""
    first_ratio_low_precision: float = Field(5e-2, gt=0)
    """the same in bf16 and fp16"""
    sampling_mismatch: float = Field(1e-3, gt=0)
    """fp32: mean difference of log-probs between sampling and training above this, nats per token"""
    sampling_mismatch_low_precision: float = Field(0.2, gt=0)
    """the same in bf16 and fp16"""
    negative_kl: float = Field(-0.1, le=0)
    """mean KL below this, nats per response"""
    kl_rounding: float = Field(0.0, ge=0)
    """the KL must also be below minus this, nats per token: the error that rounding can make"""
    kl: float = Field(10.0, gt=0)
    """mean KL above this, nats per response"""
    equal_advantages: float = Field(1e-6, ge=0)
    """standard deviation of the advantages (before whitening) or of the scores at most this"""
    critic_error: float = Field(1.0, gt=0)
    """mean squared error of the critic above this many times the variance of the returns, in critic_in_a_row iterations
    in a row"""
    critic_in_a_row: int = Field(15, ge=1)
    """the demo's critic, which starts from the reward model, needs 12"""
    advantage_peak: float = Field(0.5, ge=0, le=1)
    """share of one token in the squares of all advantages above this"""
    score_at_clip: float = Field(0.5, ge=0, le=1)
    """share of scores at the reward clip above this"""
    clip_fraction: float = Field(0.3, ge=0, le=1)
    """share of tokens on which the policy's clip binds above this"""
    length_growth: float = Field(2.0, gt=1)
    """mean response length above this many times that of the start"""
    length_shrink: float = Field(0.5, gt=0, lt=1)
    """mean response length below this many times that of the start"""
    truncated: float = Field(0.95, ge=0, le=1)
    """share of responses cut before their EOS above this"""
    score_length_correlation: float = Field(0.7, ge=0, le=1)
    """correlation of score and response length above this"""
    repeated_4_grams: float = Field(0.3, ge=0, le=1)
    """share of 4-grams that occurred earlier in the same response above this"""
    entropy: float = Field(0.2, gt=0, lt=1)
    """entropy below this many times that of the start"""
    distinct_pairs: float = Field(0.1, gt=0, lt=1)
    """held-out distinct pairs of tokens below this many times those before training"""
    disagreement: float = Field(2.0, gt=1)
    """disagreement of the reward models above this many times that of the start, while the score is higher"""
    over_optimisation: float = Field(0.2, ge=0)
    """held-out score below its best, twice in a row, by more than this share of its gain and more than its 95 %
    interval"""


@dataclass(frozen=True, slots=True)
class Notice:
    """One warning: its name, the numbers behind it, and the next step."""

    name: str
    numbers: Numbers
    advice: str


@dataclass(frozen=True, slots=True)
class Rule:
    """`condition` gives the numbers to show if it holds for the newest row, which has all metrics in `needs`."""

    name: str
    needs: tuple[str, ...]
    condition: Callable[[Limits, Rows], Numbers | None]
    advice: str


class Watch:
    """The iterations so far, and the conditions that hold."""

    def __init__(self, limits: Limits, dtype: str = "fp32") -> None:
        """dtype: fp32, bf16 or fp16, in which the policy computes."""
        if dtype != "fp32":
            std = limits.first_ratio_low_precision  # of the ratio; KL(pi_s, pi_t) is half its square
            low = {"first_ratio": std, "kl_rounding": std * std / 2}
            low["sampling_mismatch"] = limits.sampling_mismatch_low_precision
            limits = limits.model_copy(update=low)
        self._limits = limits
        self._rows: list[Mapping[str, float]] = []
        self._holding: set[str] = set()

    def check(self, iteration: int, metrics: Mapping[str, float]) -> list[Notice]:
        """The warnings whose conditions begin to hold at this iteration."""
        self._rows.append({"iteration": iteration} | {n: metrics[n] for n in WATCHED if n in metrics})
        notices = []
        for rule in RULES:
            if not all(name in metrics for name in rule.needs):
                continue
            numbers = rule.condition(self._limits, self._rows)
            if numbers is None:
                self._holding.discard(rule.name)
            elif rule.name not in self._holding:
                self._holding.add(rule.name)
                notices.append(Notice(rule.name, numbers, rule.advice))
        return notices

    def state_dict(self) -> dict[str, Any]:
        """The rows so far, and the rules that hold."""
        return {"rows": self._rows, "holding": sorted(self._holding)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows, self._holding = list(state["rows"]), set(state["holding"])


# --- conditions: the numbers to show if they hold for the newest row


def _above(name: str, limit: str, limits: Limits, rows: Rows) -> Numbers | None:
    value, most = rows[-1][name], getattr(limits, limit)
    return {name: value, "limit": most} if value > most else None


def _above_in_a_row(name: str, limit: str, limits: Limits, rows: Rows, count: str = "in_a_row") -> Numbers | None:
    return _in_a_row(name, getattr(limits, limit), operator.gt, getattr(limits, count), rows)


def _negative_kl(limits: Limits, rows: Rows) -> Numbers | None:
    newest = rows[-limits.in_a_row :]
    limit = limits.negative_kl - limits.kl_rounding * max(row.get("response_length", 0.0) for row in newest)
    return _in_a_row("kl", limit, operator.lt, limits.in_a_row, rows)


def _in_a_row(
    name: str, limit: float, beyond: Callable[[float, float], bool], count: int, rows: Rows
) -> Numbers | None:
    newest = rows[-count:]
    if len(newest) < count or not all(name in row and beyond(row[name], limit) for row in newest):
        return None
    return {name: newest[-1][name], "limit": limit, "iterations": count}


def _above_start(name: str, factor: str, limits: Limits, rows: Rows) -> Numbers | None:
    value, start = rows[-1][name], _start(name, limits, rows)
    return {name: value, "at_start": start} if value > getattr(limits, factor) * start else None


def _below_start(name: str, factor: str, limits: Limits, rows: Rows) -> Numbers | None:
    value, start = rows[-1][name], _start(name, limits, rows)
    return {name: value, "at_start": start} if value < getattr(limits, factor) * start else None


def _start(name: str, limits: Limits, rows: Rows) -> float:
    """The mean of the first values there are (a critic's warm-up has no entropy), NaN as long as the start lasts."""
    count = limits.start_iterations
    first = list(islice((row[name] for row in rows if name in row), count + 1))
    return sum(first[:count]) / count if len(first) > count else math.nan


def _first_ratio(limits: Limits, rows: Rows) -> Numbers | None:
    numbers = {name: rows[-1][name] for name in ("first_approx_kl", "first_ratio_std") if name in rows[-1]}
    over = any(value > limits.first_ratio for value in numbers.values())
    return {**numbers, "limit": limits.first_ratio} if over else None


def _equal_advantages(limits: Limits, rows: Rows) -> Numbers | None:
    row = rows[-1]
    spread = "raw_advantage_std" if "raw_advantage_std" in row else "advantage_std"
    numbers = {name: row[name] for name in (spread, "score_std") if name in row}
    return numbers if any(value <= limits.equal_advantages for value in numbers.values()) else None


def _declined(name: str, limits: Limits, rows: Rows) -> Numbers | None:
    """`name`, a held-out number, was below its best in the last two evaluations; the training score has risen since."""
    evaluations = [(row[name], row["score"]) for row in rows if name in row and "score" in row]
    if len(evaluations) < 3:
        return None
    best, score_at_best = max(evaluations, key=lambda pair: pair[0])
    noise = rows[-1].get(f"{name}_ci95", 0.0)
    floor = best - max(noise, limits.over_optimisation * (best - evaluations[0][0]))
    if not all(held_out < floor and score > score_at_best for held_out, score in evaluations[-2:]):
        return None
    spread = {key: rows[-1][key] for key in ("score_disagreement",) if key in rows[-1]}
    return {
        name: evaluations[-1][0],
        "best": best,
        "score": evaluations[-1][1],
        "score_at_best": score_at_best,
    } | spread


def _members_disagree(limits: Limits, rows: Rows) -> Numbers | None:
    numbers = _above_start("score_disagreement", "disagreement", limits, rows)
    risen = rows[-1]["score"] > _start("score", limits, rows)
    return {**numbers, "score": rows[-1]["score"]} if numbers is not None and risen else None


JUDGED = (
    "eval_judge_before", "eval_judge", "eval_judge_gain_ci95", "eval_score_before", "eval_score", "eval_score_ci95",
)  # fmt: skip


def _judge_diverges(limits: Limits, rows: Rows) -> Numbers | None:
    """The held-out score has risen since the start, and the judge has fallen, both by more than their intervals."""
    row = rows[-1]
    rise, fall = row["eval_score"] - row["eval_score_before"], row["eval_judge_before"] - row["eval_judge"]
    if not (rise > row["eval_score_ci95"] and fall > row["eval_judge_gain_ci95"]):
        return None
    return {name: row[name] for name in JUDGED if not name.endswith("_ci95")}


def _collapsed(limits: Limits, rows: Rows) -> Numbers | None:
    numbers = {name: rows[-1][name] for name in ("eval_distinct_2_before", "eval_distinct_2")}
    before, now = numbers.values()
    return numbers if now < limits.distinct_pairs * before else None


def _unmoved(limits: Limits, rows: Rows) -> Numbers | None:
    return {"eval_changed": 0.0} if rows[-1]["eval_changed"] == 0 else None


def _skipped_steps(limits: Limits, rows: Rows) -> Numbers | None:
    skipped, steps = rows[-1]["skipped_steps"], rows[-1]["optimizer_steps"]
    return {"skipped_steps": skipped, "optimizer_steps": steps} if skipped >= steps > 0 else None


RULES = (
    Rule(
        "first_ratio",
        ("first_approx_kl",),
        _first_ratio,
        "sampling and training passes disagree before any step: check for dropout, another temperature or dtype, "
        "or a wrong mask in the policy or the algorithm",
    ),
    Rule(
        "sampling_mismatch",
        ("sampling_mismatch",),
        partial(_above, "sampling_mismatch", "sampling_mismatch"),
        "the sampler's log-probs are not those of the training pass: check the rollout backend, its weights and its "
        "temperature, and do not turn rescore off",
    ),
    Rule(
        "negative_kl",
        ("kl",),
        _negative_kl,
        "a KL cannot stay below 0: responses are not sampled from the distribution that scores them; "
        "check --temperature, truncated sampling and masks",
    ),
    Rule(
        "kl_above_limit",
        ("kl",),
        partial(_above, "kl", "kl"),
        "the policy is far from the reference: read samples, raise --kl-coef or lower --learning-rate",
    ),
    Rule(
        "equal_advantages",
        ("advantage_std",),
        _equal_advantages,
        "nothing to learn from: every response scores alike; check --reward on a few samples, "
        "or raise --temperature or --batch-size",
    ),
    Rule(
        "critic_worse_than_mean",
        ("critic_error",),
        partial(_above_in_a_row, "critic_error", "critic_error", count="critic_in_a_row"),
        "the mean return predicts returns better than the critic: let it learn alone first "
        "(--critic-warmup-iterations), raise --critic-learning-rate, scale the scores (--use-score-scaling), or train "
        "the reward model that it starts from with token_coef 0.5",
    ),
    Rule(
        "advantage_of_one_token",
        ("advantage_peak",),
        partial(_above, "advantage_peak", "advantage_peak"),
        "one token decides the update: look for a score far from the others (--export-rollouts), clip scores "
        "(--score-clip), or raise --batch-size",
    ),
    Rule(
        "score_at_clip",
        ("score_at_clip",),
        partial(_above, "score_at_clip", "score_at_clip"),
        "better and worse responses score alike there: widen the clip, or scale the scores before it",
    ),
    Rule(
        "clip_fraction",
        ("clip_fraction",),
        partial(_above_in_a_row, "clip_fraction", "clip_fraction"),
        "updates go further than the clip allows: lower --learning-rate or --num-ppo-epochs",
    ),
    Rule(
        "length_exploding",
        ("response_length",),
        partial(_above_start, "response_length", "length_growth"),
        "read samples: the reward may pay for length; lower it for length, or raise --kl-coef",
    ),
    Rule(
        "length_collapsing",
        ("response_length",),
        partial(_below_start, "response_length", "length_shrink"),
        "read samples: the reward may pay for ending early; check --missing-eos-penalty, or raise --kl-coef",
    ),
    Rule(
        "truncated",
        ("truncated",),
        partial(_above, "truncated", "truncated"),
        "hardly a response writes its EOS: raise --response-length, set --missing-eos-penalty, "
        "or train step 1 on responses that end",
    ),
    Rule(
        "score_follows_length",
        ("score_length_correlation",),
        partial(_above_in_a_row, "score_length_correlation", "score_length_correlation"),
        "longer responses score higher whatever they say: train the reward model on pairs of equal length, "
        "or add a length penalty",
    ),
    Rule(
        "repeated_ngrams",
        ("repeated_4_grams",),
        partial(_above, "repeated_4_grams", "repeated_4_grams"),
        "responses repeat themselves: read samples, raise --kl-coef, or penalise repetition in the reward",
    ),
    Rule(
        "entropy_collapse",
        ("entropy",),
        partial(_below_start, "entropy", "entropy"),
        "the policy hardly explores any more: raise --kl-coef, lower --learning-rate, or stop here",
    ),
    Rule(
        "over_optimisation",
        ("eval_judge", "score"),
        partial(_declined, "eval_judge"),
        "the reward rises while the judge falls: go back to the best checkpoint, raise --kl-coef, "
        "or retrain the reward model on samples of this policy",
    ),
    Rule(
        "judge_diverges",
        JUDGED,
        _judge_diverges,
        "the policy gains the reward and loses the judge: read samples.jsonl, raise --kl-coef, or retrain the reward "
        "model on samples of this policy",
    ),
    Rule(
        "members_disagree",
        ("score_disagreement", "score"),
        _members_disagree,
        "the score rises where the reward models agree less than at the start, which points to over-optimisation: read "
        "samples, raise --uncertainty-coef or --kl-coef, or retrain the reward models on samples of this policy",
    ),
    Rule(
        "overfitting",
        ("eval_score", "score"),
        partial(_declined, "eval_score"),
        "the score rises on training prompts and falls on held-out ones: use more prompts or fewer --total-episodes",
    ),
    Rule(
        "policy_collapsed",
        ("eval_distinct_2_before", "eval_distinct_2"),
        _collapsed,
        "held-out responses are all alike: go back to an earlier checkpoint, raise --kl-coef, or lower --learning-rate",
    ),
    Rule(
        "policy_unmoved",
        ("eval_changed", "entropy"),  # a critic's warm-up, which has no entropy, leaves the policy as it is
        _unmoved,
        "every held-out response is the one before training: raise --learning-rate or --total-episodes, and look above "
        "for steps that were skipped",
    ),
    Rule(
        "skipped_steps",
        ("skipped_steps", "optimizer_steps"),
        _skipped_steps,
        "no optimizer step of this iteration was applied: the lines above name the numbers that were not finite; lower "
        "--learning-rate, check the rows that they name, or in fp16 use --dtype bf16",
    ),
)
WATCHED = frozenset(
    {"first_ratio_std", "raw_advantage_std", "score_std", "eval_judge_ci95", "eval_score_ci95"}
    | {name for rule in RULES for name in rule.needs}
)
