"""Named warnings while step 3 runs: what the metrics of an iteration mean, and what to do. Pure functions.

A warning is given once when its condition begins to hold, and again only after the condition was absent for a while: a
metric that is near its limit crosses it every few iterations. An iteration without a metric does not change the
conditions that need it.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from rlhf.config import Tree

Numbers = dict[str, float]
Rows = Sequence[Mapping[str, float]]
"""Metrics of every iteration so far, the newest last."""


START = 3
"""iterations at the start; length and entropy are compared with their mean"""
IN_A_ROW = 3
"""iterations in a row for which a noisy condition must hold"""
CRITIC_IN_A_ROW = 15
"""the same for the critic: the demo's, which starts from the reward model, needs 12"""
CLEARED = 10
"""times in a row that a condition must be absent before its warning comes again"""
NEGATIVE_KL = -0.1
"""nats per response"""
EQUAL_ADVANTAGES = 1e-6
"""standard deviation of the advantages (before whitening) or of the scores"""
COLLAPSED = 0.1
"""held-out distinct pairs of tokens, as a share of those before training"""
OVER_BUDGET = 1.5
"""KL that is too much, over the budget for it"""
OVER_OPTIMISED = 0.2
"""held-out score below its best, as a share of its gain"""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far two passes of one policy may differ in a dtype, and how far the policy may go."""

    first_ratio: float
    """first_approx_kl, or the std of the first ratio"""
    sampling_mismatch: float
    """mean difference of log-probs between sampling and training, nats per token"""
    kl: float
    """the error of a KL, nats per token: KL(pi_s, pi_t) is half the square of the ratio's std"""
    kl_limit: float = 10.0
    """nats per response"""


FP32, LOW_PRECISION = Limits(1e-3, 1e-3, 0.0), Limits(5e-2, 0.2, 5e-2**2 / 2)
"""LOW_PRECISION: bf16 and fp16"""


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
    """`{closer}` stands for what keeps the policy closer to its reference"""


class Watch:
    """The iterations so far, and the conditions that hold."""

    def __init__(self, dtype: str = "fp32", kl_budget: float | None = None, closer: str = "raise --kl-coef") -> None:
        """dtype: fp32, bf16 or fp16, in which the policy computes. kl_budget: the KL that is wanted at the end, nats.
        closer: the advice of `KLController`"""
        self._closer = closer
        limits = FP32 if dtype == "fp32" else LOW_PRECISION
        self._limits = replace(limits, kl_limit=max(limits.kl_limit, OVER_BUDGET * (kl_budget or 0.0)))
        self._rows: list[Mapping[str, float]] = []
        self._absent: dict[str, int] = {}  # of each rule that has warned: times in a row that it does not hold

    def check(self, iteration: int, metrics: Mapping[str, float]) -> list[Notice]:
        """The warnings whose conditions begin to hold at this iteration."""
        self._rows.append({"iteration": iteration} | {n: metrics[n] for n in WATCHED if n in metrics})
        notices = []
        for rule in RULES:
            if not all(name in metrics for name in rule.needs):
                continue
            numbers = rule.condition(self._limits, self._rows)
            if numbers is not None:
                if self._absent.get(rule.name, CLEARED) >= CLEARED:
                    notices.append(Notice(rule.name, numbers, rule.advice.format(closer=self._closer)))
                self._absent[rule.name] = 0
            elif rule.name in self._absent:
                self._absent[rule.name] += 1
        return notices

    def state_dict(self) -> Tree:
        """The rows so far, and for how long each rule that has warned does not hold."""
        return {"rows": self._rows, "absent": self._absent}

    def load_state_dict(self, state: Tree) -> None:
        self._rows = list(state["rows"])
        # An earlier version saved the names of the rules that hold.
        self._absent = dict(state["absent"]) if "absent" in state else dict.fromkeys(state["holding"], 0)


# --- conditions: the numbers to show if they hold for the newest row


def _above(name: str, limit: float, _: Limits, rows: Rows) -> Numbers | None:
    value = rows[-1][name]
    return {name: value, "limit": limit} if value > limit else None


def _above_in_a_row(name: str, limit: float, count: int, _: Limits, rows: Rows) -> Numbers | None:
    return _in_a_row(name, limit, operator.gt, count, rows)


def _far(limits: Limits, rows: Rows) -> Numbers | None:
    return _above("kl", limits.kl_limit, limits, rows)


def _sampling_mismatch(limits: Limits, rows: Rows) -> Numbers | None:
    return _above("sampling_mismatch", limits.sampling_mismatch, limits, rows)


def _negative_kl(limits: Limits, rows: Rows) -> Numbers | None:
    limit = NEGATIVE_KL - limits.kl * max(row.get("response_length", 0.0) for row in rows[-IN_A_ROW:])
    return _in_a_row("kl", limit, operator.lt, IN_A_ROW, rows)


def _in_a_row(
    name: str, limit: float, beyond: Callable[[float, float], bool], count: int, rows: Rows
) -> Numbers | None:
    newest = rows[-count:]
    if len(newest) < count or not all(name in row and beyond(row[name], limit) for row in newest):
        return None
    return {name: newest[-1][name], "limit": limit, "iterations": count}


def _above_start(name: str, factor: float, _: Limits, rows: Rows) -> Numbers | None:
    value, start = rows[-1][name], _start(name, rows)
    return {name: value, "at_start": start} if value > factor * start else None


def _below_start(name: str, factor: float, _: Limits, rows: Rows) -> Numbers | None:
    value, start = rows[-1][name], _start(name, rows)
    return {name: value, "at_start": start} if value < factor * start else None


def _start(name: str, rows: Rows) -> float:
    """The mean of the first values there are (a critic's warm-up has no entropy), NaN as long as the start lasts."""
    first = list(islice((row[name] for row in rows if name in row), START + 1))
    return sum(first[:START]) / START if len(first) > START else math.nan


def _first_ratio(limits: Limits, rows: Rows) -> Numbers | None:
    numbers = {name: rows[-1][name] for name in ("first_approx_kl", "first_ratio_std") if name in rows[-1]}
    over = any(value > limits.first_ratio for value in numbers.values())
    return {**numbers, "limit": limits.first_ratio} if over else None


def _equal_advantages(_: Limits, rows: Rows) -> Numbers | None:
    row = rows[-1]
    spread = "raw_advantage_std" if "raw_advantage_std" in row else "advantage_std"
    numbers = {name: row[name] for name in (spread, "score_std") if name in row}
    return numbers if any(value <= EQUAL_ADVANTAGES for value in numbers.values()) else None


def _declined(name: str, _: Limits, rows: Rows) -> Numbers | None:
    """`name`, a held-out number, was below its best in the last two evaluations; the training score has risen since."""
    evaluations = [(row[name], row["score"]) for row in rows if name in row and "score" in row]
    if len(evaluations) < 3:
        return None
    best, score_at_best = max(evaluations, key=lambda pair: pair[0])
    noise = rows[-1].get(f"{name}_ci95", 0.0)
    floor = best - max(noise, OVER_OPTIMISED * (best - evaluations[0][0]))
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
    numbers = _above_start("score_disagreement", 2.0, limits, rows)
    risen = rows[-1]["score"] > _start("score", rows)
    return {**numbers, "score": rows[-1]["score"]} if numbers is not None and risen else None


JUDGED = (
    "eval_judge_before", "eval_judge", "eval_judge_gain_ci95", "eval_score_before", "eval_score", "eval_score_ci95",
)  # fmt: skip


def _judge_diverges(_: Limits, rows: Rows) -> Numbers | None:
    """The held-out score has risen since the start, and the judge has fallen, both by more than their intervals."""
    row = rows[-1]
    rise, fall = row["eval_score"] - row["eval_score_before"], row["eval_judge_before"] - row["eval_judge"]
    if not (rise > row["eval_score_ci95"] and fall > row["eval_judge_gain_ci95"]):
        return None
    return {name: row[name] for name in JUDGED if not name.endswith("_ci95")}


def _collapsed(_: Limits, rows: Rows) -> Numbers | None:
    numbers = {name: rows[-1][name] for name in ("eval_distinct_2_before", "eval_distinct_2")}
    before, now = numbers.values()
    return numbers if now < COLLAPSED * before else None


def _unmoved(_: Limits, rows: Rows) -> Numbers | None:
    return {"eval_changed": 0.0} if rows[-1]["eval_changed"] == 0 else None


def _skipped_steps(_: Limits, rows: Rows) -> Numbers | None:
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
        _sampling_mismatch,
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
        _far,
        "the policy is far from the reference: read samples, {closer} or lower --learning-rate",
    ),
    Rule(
        "equal_advantages",
        ("advantage_std",),
        _equal_advantages,
        "nothing to learn from: every response, or every response to the same prompt, scores alike; check --reward on "
        "a few samples, or raise --temperature or --batch-size",
    ),
    Rule(
        "equal_groups",
        ("equal_groups",),
        partial(_above_in_a_row, "equal_groups", 0.5, IN_A_ROW),
        "most prompts teach nothing, because all responses to them score alike: choose prompts that are neither too "
        "easy nor too hard, raise --num-generations or --temperature, or draw others with --resample-groups",
    ),
    Rule(
        "critic_worse_than_mean",
        ("critic_error",),
        partial(_above_in_a_row, "critic_error", 1.0, CRITIC_IN_A_ROW),
        "the mean return predicts returns better than the critic: let it learn alone first "
        "(--critic-warmup-iterations), raise --critic-learning-rate, scale the scores (--use-score-scaling), or train "
        "the reward model that it starts from with the objective every_token",
    ),
    Rule(
        "advantage_of_one_token",
        ("advantage_peak",),
        partial(_above, "advantage_peak", 0.5),
        "one token decides the update: look for a score far from the others (--export-rollouts), clip scores "
        "(--score-clip), or raise --batch-size",
    ),
    Rule(
        "score_at_clip",
        ("score_at_clip",),
        partial(_above, "score_at_clip", 0.5),
        "better and worse responses score alike there: widen the clip, or scale the scores before it",
    ),
    Rule(
        "clip_fraction",
        ("clip_fraction",),
        partial(_above_in_a_row, "clip_fraction", 0.3, IN_A_ROW),
        "updates go further than the clip allows: lower --learning-rate or --num-ppo-epochs",
    ),
    Rule(
        "length_exploding",
        ("response_length",),
        partial(_above_start, "response_length", 2.0),
        "read samples: the reward may pay for length; lower it for length, or {closer}",
    ),
    Rule(
        "length_collapsing",
        ("response_length",),
        partial(_below_start, "response_length", 0.5),
        "read samples: the reward may pay for ending early; check --missing-eos-penalty, or {closer}",
    ),
    Rule(
        "truncated",
        ("truncated",),
        partial(_above, "truncated", 0.95),
        "few responses end with EOS: raise --response-length, set --missing-eos-penalty, "
        "or train step 1 on responses that end",
    ),
    Rule(
        "score_follows_length",
        ("score_length_correlation",),
        partial(_above_in_a_row, "score_length_correlation", 0.7, IN_A_ROW),
        "longer responses score higher whatever they say: train the reward model on pairs of equal length, "
        "or add a length penalty",
    ),
    Rule(
        "repeated_ngrams",
        ("repeated_4_grams",),
        partial(_above, "repeated_4_grams", 0.3),
        "responses repeat themselves: read samples, {closer}, or penalise repetition in the reward",
    ),
    Rule(
        "entropy_collapse",
        ("entropy",),
        partial(_below_start, "entropy", 0.2),
        "the policy hardly explores any more: {closer}, lower --learning-rate, or stop here",
    ),
    Rule(
        "over_optimisation",
        ("eval_judge", "score"),
        partial(_declined, "eval_judge"),
        "the reward rises while the judge falls: go back to the best checkpoint, {closer}, "
        "or retrain the reward model on samples of this policy",
    ),
    Rule(
        "judge_diverges",
        JUDGED,
        _judge_diverges,
        "the policy gains the reward and loses the judge: read samples.jsonl, {closer}, or retrain the reward "
        "model on samples of this policy",
    ),
    Rule(
        "members_disagree",
        ("score_disagreement", "score"),
        _members_disagree,
        "the score rises where the reward models agree less than at the start, which points to over-optimisation: read "
        "samples, raise --uncertainty-coef, {closer}, or retrain the reward models on samples of this policy",
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
        "held-out responses are all alike: go back to an earlier checkpoint, {closer}, or lower --learning-rate",
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
