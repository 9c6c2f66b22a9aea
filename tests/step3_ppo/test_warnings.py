"""Each warning provoked, each silent on a healthy run, each said once per onset."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config import option_names
from rlhf.training.record import LEFT_OUT, Recorder
from rlhf.types import Credit, Message, Row, ScoredRollout
from step3_ppo import warnings
from step3_ppo.algorithms import best_of_n, ppo
from step3_ppo.config import ScoreOptions
from step3_ppo.kl import KLController, KLOptions
from step3_ppo.metrics import credit_metrics, rollout_metrics, shaped_metrics
from step3_ppo.warnings import CLEARED, RULES, Watch
from tests.support.provoked_warnings import GAINED, HEALTHY, PROVOKED, QUIET, Changes, names


def test_a_healthy_run_is_silent() -> None:
    rising = [{"score": 0.1 * i, "kl": 0.1 * i, "entropy": 2 - 0.02 * i, "eval_judge": 0.1 * i} for i in range(40)]
    assert names(rising) == []


NUMBERS: dict[str, Changes] = {
    "first_ratio": {"first_approx_kl": 2e-3, "first_ratio_std": 3e-6, "limit": 1e-3},
    "sampling_mismatch": {"sampling_mismatch": 2e-3, "limit": 1e-3},
    "negative_kl": {"kl": -0.11, "limit": -0.1, "iterations": 3},
    "kl_above_limit": {"kl": 10.1, "limit": 10.0},
    "equal_advantages": {"raw_advantage_std": 0.0, "score_std": 0.7},
    "equal_groups": {"equal_groups": 0.6, "limit": 0.5, "iterations": 3},
    "critic_worse_than_mean": {"critic_error": 1.1, "limit": 1.0, "iterations": 15},
    "advantage_of_one_token": {"advantage_peak": 0.51, "limit": 0.5},
    "score_at_clip": {"score_at_clip": 0.51, "limit": 0.5},
    "clip_fraction": {"clip_fraction": 0.31, "limit": 0.3, "iterations": 3},
    "length_exploding": {"response_length": 81.0, "at_start": 40.0},
    "length_collapsing": {"response_length": 19.0, "at_start": 40.0},
    "truncated": {"truncated": 0.96, "limit": 0.95},
    "score_follows_length": {"score_length_correlation": 0.71, "limit": 0.7, "iterations": 3},
    "repeated_ngrams": {"repeated_4_grams": 0.31, "limit": 0.3},
    "entropy_collapse": {"entropy": 0.39, "at_start": 2.0},
    "over_optimisation": {
        "eval_judge": 0.6,
        "best": 1.0,
        "score": 4.0,
        "score_at_best": 2.0,
        "score_disagreement": 0.3,
    },
    "judge_diverges": {"eval_judge_before": 0.5, "eval_judge": 0.1, "eval_score_before": 0.0, "eval_score": 1.1},
    "members_disagree": {"score_disagreement": 0.61, "at_start": pytest.approx(0.3), "score": 1.1},
    "overfitting": {"eval_score": -0.2, "best": 0.0, "score": 3.0, "score_at_best": 0.0, "score_disagreement": 0.3},
    "policy_collapsed": {"eval_distinct_2_before": 0.5, "eval_distinct_2": 0.0499},
    "policy_unmoved": {"eval_changed": 0.0},
    "skipped_steps": {"skipped_steps": 8.0, "optimizer_steps": 8.0},
}
"""What each then shows."""


def test_every_warning_is_provoked() -> None:
    assert set(PROVOKED) == set(NUMBERS) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_warning_comes_alone_and_at_its_onset_with_its_numbers(name: str) -> None:
    watch = Watch()
    notices = [watch.check(i, HEALTHY | dict(changes)) for i, changes in enumerate(PROVOKED[name])]
    assert [[notice.name for notice in each] for each in notices] == [[]] * (len(notices) - 1) + [[name]]
    assert notices[-1][0].numbers == NUMBERS[name]


def test_at_its_limit_a_number_warns_of_nothing_but_for_a_spread() -> None:
    at: Changes = {"kl": 10.0, "score_at_clip": 0.5, "clip_fraction": 0.3, "truncated": 0.95, "repeated_4_grams": 0.3}
    more = {"first_approx_kl": 1e-3, "first_ratio_std": 1e-3, "score_length_correlation": 0.7}
    assert names([{**at, **more}] * 4) == []
    assert names([{"kl": -0.1}] * 4 + [{"response_length": 80.0}, {"response_length": 20.0}]) == []
    assert names([QUIET, {"score_std": 1e-6}]) == [(2, "equal_advantages")]


RISEN: Changes = {"eval_judge": 2.0, "eval_score": 2.0, "score": 5.0}
CALM: dict[str, Changes] = {
    "over_optimisation": RISEN,
    "overfitting": RISEN,
    "judge_diverges": {**GAINED, "eval_judge": 2.0},
    "policy_collapsed": {"eval_distinct_2_before": 0.5, "eval_distinct_2": 0.5},
    "policy_unmoved": {"eval_changed": 0.5},
}
"""Held-out numbers that end a warning; the others end without theirs."""


@pytest.mark.parametrize("name", PROVOKED)
def test_a_warning_is_said_once_and_again_after_it_cleared(name: str) -> None:
    provoked = PROVOKED[name]
    bad = provoked[-1]
    held_out = name in ("over_optimisation", "overfitting")
    calm = CALM.get(name, QUIET)
    again = [{**bad, "score": 9.0}] * 3 if held_out else [bad] * (15 if name == "critic_worse_than_mean" else 3)
    onsets = [iteration for iteration, _ in names([*provoked, bad, bad, *[calm] * CLEARED, *again])]
    assert onsets[0] == len(provoked) and len(onsets) == 2
    assert onsets[1] > len(provoked) + 2 + CLEARED


def test_a_metric_near_its_limit_warns_once() -> None:
    """As of a run of weeks whose truncated share is about 0.95: it was one line in four iterations."""
    assert names([{"truncated": 0.96}, *[{"truncated": 0.94}] * 9] * 40) == [(1, "truncated")]


@pytest.mark.parametrize(
    "changes",
    [
        [{"first_approx_kl": 9e-4, "first_ratio_std": 9e-4}],
        [{"kl": -0.5}, {"kl": -0.5}, {"kl": 0.1}] * 4,
        [{"clip_fraction": 0.9}, {"clip_fraction": 0.9}, QUIET] * 4,
        [{"score_length_correlation": 0.9}, QUIET] * 6,
        [{"score_length_correlation": -0.9}] * 6,  # a fine for being cut is no fondness for length
        [{"response_length": 10.0}, {"response_length": 90.0}, {"response_length": 19.0}],  # this is the start
        [*[QUIET] * 3, {"score_disagreement": 0.61, "score": 0.9}, {"score_disagreement": 0.59, "score": 2.0}],
        [{"critic_error": 2.0}] * 14 + [QUIET] + [{"critic_error": 2.0}] * 14,
        [GAINED | {"eval_judge": 0.0, "eval_score": 1.0}, GAINED | {"eval_judge": 0.2}, GAINED | {"eval_judge": 0.9}],
        [{"skipped_steps": 7.0}],
        [{"skipped_steps": 0.0, "optimizer_steps": 0.0}],
        # Held-out numbers that fall once, by less than a fifth of what was gained, or while training falls too, or
        # within their interval.
        [{"eval_judge": x, "score": float(i)} for i, x in enumerate([0.0, 1.0, 0.9, 0.85])],
        [{"eval_judge": 1.0, "score": 1.0}, {"eval_judge": 0.0, "score": 2.0}, {"eval_judge": 1.0, "score": 3.0}],
        [{"eval_judge": 1.0 - i / 9, "score": 1.0 - i / 9} for i in range(9)],
        [{"eval_judge": 1.0 - i / 99, "score": float(i), "eval_judge_ci95": 0.2} for i in range(9)],
    ],
)
def test_what_deserves_no_warning(changes: list[Changes]) -> None:
    assert names(changes) == []


def test_the_spread_of_the_first_ratio_counts_and_low_precision_has_its_own_limit() -> None:
    assert names([{"first_ratio_std": 2e-3}]) == [(1, "first_ratio")]
    assert names([{"first_ratio_std": 2e-2}], dtype="bf16") == []
    assert names([{"first_ratio_std": 6e-2}], dtype="bf16") == [(1, "first_ratio")]


def test_a_policy_whose_critic_learns_alone_has_not_failed_to_move() -> None:
    warm_up = {name: value for name, value in HEALTHY.items() if name != "entropy"} | {"eval_changed": 0.0}
    watch = Watch()
    assert watch.check(1, warm_up) == []
    assert [notice.name for notice in watch.check(2, HEALTHY | {"eval_changed": 0.0})] == ["policy_unmoved"]


def test_equal_scores_are_seen_behind_a_critic_that_differs() -> None:
    assert names([{"score_std": 0.0}]) == [(1, "equal_advantages")]


def test_advantages_that_are_not_whitened_have_one_spread() -> None:
    metrics = {name: value for name, value in HEALTHY.items() if name != "raw_advantage_std"}
    [notice] = Watch().check(1, metrics | {"advantage_std": 0.0})
    assert (notice.name, notice.numbers) == ("equal_advantages", {"advantage_std": 0.0, "score_std": 0.7})


@pytest.mark.parametrize("name", HEALTHY)
def test_a_number_that_is_missing_or_undefined_warns_of_nothing(name: str) -> None:
    watch = Watch()
    for iteration in range(6):
        lacking = {n: value for n, value in HEALTHY.items() if n != name}
        assert watch.check(iteration, lacking) == []
        assert watch.check(iteration, HEALTHY | {name: math.nan}) == []


def test_evaluations_far_apart_do_not_repeat_a_warning() -> None:
    """Between two evaluations nothing is known of the held-out score, so nothing has cleared."""
    bad = {"eval_judge": 0.1, "score": 9.0}
    rows: list[Changes] = [*PROVOKED["over_optimisation"], QUIET, QUIET, bad, QUIET, bad]
    assert names(rows) == [(4, "over_optimisation")]


def test_after_a_resume_the_start_is_still_the_start() -> None:
    before, after = Watch(), Watch()
    for iteration, row in enumerate([HEALTHY] * 4 + [HEALTHY | {"kl": 12.0}]):
        before.check(iteration, row)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    notices = after.check(6, HEALTHY | {"kl": 12.0, "response_length": 90.0})
    assert [notice.name for notice in notices] == ["length_exploding"]  # the KL was warned of
    after.load_state_dict({"rows": [], "holding": ["kl_above_limit"]})  # of an earlier version
    assert after.check(1, HEALTHY | {"kl": 12.0}) == []


def test_a_warm_up_of_the_critic_is_not_the_start_of_the_policy() -> None:
    watch = Watch()
    warm_up = {n: value for n, value in HEALTHY.items() if n != "entropy"}
    rows = [*[warm_up] * 4, *[HEALTHY] * 3, HEALTHY | {"entropy": 0.3}]
    warned = [[n.name for n in watch.check(i, row)] for i, row in enumerate(rows)]
    assert warned == [[]] * 7 + [["entropy_collapse"]]


# --- from real rollouts


def rollout(
    lengths: list[int], scores: list[float], ids: torch.Tensor | None = None, ref: float = -2.0
) -> ScoredRollout:
    size, width = len(lengths), max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    draw = torch.Generator().manual_seed(0)
    return ScoredRollout(
        prompt_ids=torch.ones(size, 2).long(),
        prompt_mask=torch.ones(size, 2).bool(),
        response_ids=torch.randint(4, 10_000, (size, width), generator=draw) if ids is None else ids,
        mask=mask,
        sampled_logprobs=mask * -2.0,
        ended=torch.ones(size).bool(),
        rows=tuple(Row((Message("user", "?"),)) for _ in range(size)),
        logprobs=mask * -2.0,
        ref_logprobs=mask * ref,
        scores=torch.tensor(scores),
        source_scores=torch.empty(size, 0),
    )


def of_rollout(sample: ScoredRollout, iterations: int = 3, score_clip: float | None = None) -> set[str]:
    advantages = (sample.scores - sample.scores.mean())[:, None] * sample.mask
    metrics = rollout_metrics(sample) | shaped_metrics(sample.scores, ScoreOptions(score_clip=score_clip))
    metrics |= credit_metrics(sample, Credit(advantages, advantages))
    watch = Watch()
    return {notice.name for i in range(iterations) for notice in watch.check(i, metrics)}


def test_rollouts_that_provoke() -> None:
    varied = [3.0, 1.0, 4.0, 1.5]
    assert of_rollout(rollout([9, 5, 7, 3], [0.0, 1.0, 0.5, 0.3])) == set()
    assert of_rollout(rollout([9, 5, 7, 3], [9.0, 5.0, 7.0, 3.0])) == {"score_follows_length"}
    assert of_rollout(rollout([9, 5, 7, 3], [0.1] * 4)) == {"equal_advantages"}
    assert of_rollout(rollout([9, 9, 9, 9], varied, torch.full((4, 9), 5))) == {"repeated_ngrams"}
    assert of_rollout(rollout([9, 9, 9, 9], varied, ref=-1.0)) == {"negative_kl"}
    assert of_rollout(rollout([9, 9, 9, 9], varied, ref=-4.0)) == {"kl_above_limit"}
    assert of_rollout(rollout([9, 9, 9, 9], [1.0, 1.0, -1.0, 0.3]), score_clip=1.0) == {"score_at_clip"}
    cut = rollout([9, 9, 9, 9], varied)
    assert of_rollout(replace(cut, ended=torch.zeros(4).bool())) == {"truncated"}


def test_what_rounding_takes_from_a_kl_is_no_warning() -> None:
    """In bf16 ratios of two passes over the same weights have a deviation of 0.05: half its square for each token."""
    rows = {"kl": -0.16, "response_length": 64.0}
    for dtype, kl, expected in (("fp32", -0.16, 1), ("bf16", -0.16, 0), ("bf16", -0.2, 1)):
        watch = Watch(dtype)
        assert len([n for i in range(4) for n in watch.check(i, rows | {"kl": kl})]) == expected
    for kl, expected in ((-0.16, 0), (-0.2, 1)):  # the longest of the three iterations counts, the first one does not
        watch = Watch("bf16")
        lengths = enumerate((400.0, 32.0, 64.0, 32.0))
        noticed = [watch.check(i, {"kl": kl, "response_length": length}) for i, length in lengths]
        names_of_each = [[notice.name for notice in notices].count("negative_kl") for notices in noticed]
        assert names_of_each == [0, 0, 0, expected]


def test_what_rounding_does_between_sampling_and_training_is_no_warning() -> None:
    for dtype, mismatch, expected in (("fp32", 0.05, 1), ("bf16", 0.05, 0), ("bf16", 0.3, 1)):
        assert len(names([{"sampling_mismatch": mismatch}], dtype=dtype)) == expected


# --- to the terminal and the file


def test_warnings_follow_their_iteration_into_the_file_and_onto_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path)
    steps = [HEALTHY, HEALTHY | {"kl": 12.5}, HEALTHY | {"kl": 13.0}]
    watch = Watch()
    for step, metrics in enumerate(recorder.follow(steps, 3, "step3_ppo", ()), start=1):
        for notice in watch.check(step, metrics):
            recorder.warn(step, notice.name, notice.numbers, notice.advice)
    recorder.close()
    rows: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [("train", 1), ("train", 2), ("warning", 2), ("train", 3)]
    assert rows[2]["name"] == "kl_above_limit" and rows[2]["numbers"] == {"kl": 12.5, "limit": 10.0}
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 1
    assert (
        lines[0].startswith("warning, step 2: kl_above_limit (kl 12.5, limit 10): ") and rows[2]["advice"] in lines[0]
    )


@pytest.mark.parametrize(
    ("options", "closer"),
    [
        (ppo.Config(), "raise --kl-coef"),
        (ppo.Config(kl_budget=3.0), "lower --kl-budget"),
        (best_of_n.Config(algorithm="best_of_n"), "lower --total-episodes"),
    ],
)
def test_advice_names_options_that_are_there_and_have_an_effect(options: Any, closer: str) -> None:
    advised = KLController(options if isinstance(options, KLOptions) else None).closer
    assert advised == closer
    watch, advice = Watch(closer=advised), {}
    for name, rows in PROVOKED.items():
        for row in rows:
            advice |= {each.name: each.advice for each in watch.check(1, HEALTHY | dict(row))}
        watch = Watch(closer=advised)
        assert "\n" not in advice[name]
        for option in re.findall(r"--([\w-]+)", advice[name]):
            assert option in option_names(type(options)), f"{name}: --{option}"
            assert option != "kl-coef" or closer == "raise --kl-coef"
    assert sum(closer in text for text in advice.values()) >= 9


def test_a_kl_is_far_beyond_what_is_wanted() -> None:
    """10 nats; 1.5 times a budget that allows more."""
    for budget, limit in ((None, 10.0), (2.0, 10.0), (15.0, 22.5)):
        [notice] = Watch("bf16", budget).check(1, HEALTHY | {"kl": limit + 0.1})
        assert (notice.name, notice.numbers["limit"]) == ("kl_above_limit", limit)
        assert Watch("fp32", budget).check(1, HEALTHY | {"kl": limit}) == []


def test_the_page_has_every_warning() -> None:
    page = (Path(warnings.__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")
    table = page[page.index("## Warnings") :]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {
        LEFT_OUT, *(rule.name for rule in RULES)
    }  # fmt: skip
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    cures = {cells[1].strip(" `"): cells[-2].strip() for cells in rows}
    del cures[LEFT_OUT]  # a tracker's warning has what it raised
    advice = {rule.name: rule.advice for rule in RULES}
    assert {name: cure.replace("`", "") for name, cure in cures.items()} == {
        name: text.format(closer="raise --kl-coef").replace("`", "") for name, text in advice.items()
    }
