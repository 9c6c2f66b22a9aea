"""Words that the training taught, and what must hold of every run."""

import json
import re
from pathlib import Path

import pytest
import torch

from rlhf.chain.stages import STAGES
from rlhf.config.options import EngineOptions
from rlhf.engine import precision
from rlhf.report.figures import curves, stages_of
from rlhf.report.invariants import invariants
from rlhf.report.records import read_runs
from rlhf.report.taught import taught
from rlhf.report.verdict import judge
from rlhf.report.write import render_report
from rlhf.training import hardware
from tests.support import recorded_runs

DECLARATIONS = [*STAGES.values()]


def test_the_words_that_rose_come_first_by_the_nearer_end_of_their_interval() -> None:
    before = ["The cat sat.", "a dog", "a cat!", "a mouse", "a cat", "the dog"] * 4
    after = ["a Kind cat", "a kind dog", "kind", "a kind mouse", "the kind", "so kind"] * 4
    rows = [{"before": old, "after": new} for old, new in zip(before, after, strict=True)]
    words = [(t.text, t.before, t.after) for t in taught(rows) if t.kind == "word"]
    assert words[0] == ("kind", 0, 24) and ("cat", 12, 4) in words
    assert {text for text, *_ in words} == {"kind", "cat"}, "the others may be chance"
    endings = [(t.text, t.before, t.after) for t in taught(rows) if t.kind == "ending"]
    assert endings[0] == ("kind", 0, 12) and ("cat", 8, 4) not in endings
    assert taught([]) == [] and taught([{"before": "", "after": None}]) == []


def with_row(stage: Path, **metrics: object) -> None:
    lines = (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    index = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "train")
    lines[index] = json.dumps(json.loads(lines[index]) | metrics)
    (stage / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def broken(out: Path) -> set[str]:
    [run] = read_runs([str(out)], DECLARATIONS)
    return {f"{each.stage}: {each.title.partition(':')[0]}" for each in invariants(run) if not each.holds}


def test_an_invariant_that_does_not_hold_is_shown(tmp_path: Path) -> None:
    out = recorded_runs.run(tmp_path / "run")
    with_row(out / "step3_ppo", first_ratio_std=0.0)
    with_row(out / "step2_reward", loss=0.7)
    assert broken(out) == set()
    page = render_report(read_runs([str(out)], DECLARATIONS), DECLARATIONS)
    assert re.search(r"<summary>(\d+) of \1 invariants hold", page)
    with_row(out / "step3_ppo", first_ratio_std=0.06)
    with_row(out / "step2_reward", loss=None)
    assert broken(out) == {"step3_ppo: first ratio is 1", "step2_reward: steps with a loss that is not finite"}
    assert "does not hold" in render_report(read_runs([str(out)], DECLARATIONS), DECLARATIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_records_the_dtype_that_auto_means(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_fast_dtype", lambda _: dtype)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    assert hardware.describe(EngineOptions())["dtype"] == name
    assert hardware.describe(EngineOptions(dtype="fp32"))["dtype"] == "fp32"


@pytest.mark.parametrize(
    ("option", "recorded", "exact"),
    [("fp32", {}, True), ("auto", {}, False), ("auto", {"dtype": "fp32"}, True), ("auto", {"dtype": "bf16"}, False)],
)
def test_in_fp32_the_bound_is_nearer(option: str, recorded: dict[str, str], exact: bool, tmp_path: Path) -> None:
    """Also where `auto`, the default, means fp32, as on most CPUs."""
    out = recorded_runs.run(tmp_path / "run")
    config = out / "step3_ppo/config.yaml"
    config.write_text(config.read_text(encoding="utf-8") + f"dtype: {option}\n", encoding="utf-8")
    recorded_runs.finish(out / "step3_ppo", hardware={"device": "a CPU", "processes": 1} | recorded)
    with_row(out / "step3_ppo", first_ratio_std=0.002)
    assert ("step3_ppo: first ratio is 1" in broken(out)) == exact


@pytest.mark.parametrize(
    ("objective", "is_known"),
    [("pairwise", True), ("every_token,token_coef=2", False), ("my_objective.py,gap=2", False), ("7", False)],
)
def test_what_only_one_loss_promises_is_not_asked_of_another(objective: str, is_known: bool, tmp_path: Path) -> None:
    """The hinge loss of a gap of 2 begins near 2, that of every_token at 3 ln 2; neither is a fault."""
    out = recorded_runs.run(tmp_path / "run")
    config = out / "step2_reward/config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("pairwise", objective), encoding="utf-8")
    with_row(out / "step2_reward", loss=2.04)
    assert bool(broken(out)) == is_known
    [run] = read_runs([str(out)], DECLARATIONS)
    stages = stages_of([run], DECLARATIONS[1])
    [loss] = [figure.chart for figure in curves(stages, DECLARATIONS[1]) if figure.chart.title == "Loss"]
    assert (loss.level is not None) == is_known


@pytest.mark.parametrize(
    ("gains", "headline"), [((1.0, 0.5), "The policy got better."), ((1.0, None), "may explain it")]
)
def test_a_reward_model_no_better_than_words_is_said(
    tmp_path: Path, gains: tuple[float, float | None], headline: str
) -> None:
    """The judge is independent of them, the score is not."""
    out = recorded_runs.run(tmp_path / "run", gains)
    metrics = out / "step2_reward/metrics.jsonl"
    row = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
    with metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"eval_words_rule": 0.74}) + "\n")
    verdict = judge(read_runs([str(out)], DECLARATIONS)[0])
    assert headline in verdict.headline and verdict.tone == ("good" if gains[1] else "unsure")
    assert any("by a bag of words 74 %" in caution for caution in verdict.cautions)
    with metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"eval_words_rule": 0.2}) + "\n")
    assert "network knows" not in "".join(judge(read_runs([str(out)], DECLARATIONS)[0]).cautions)


@pytest.mark.parametrize(
    ("gains", "kl", "said"),
    [
        ((0.0, 0.0), 1.1, "no rise of the judge or the score is shown"),
        ((0.0, None), 1.1, "no rise of the score is shown"),
        ((0.0, 0.0), 0.9, ""),  # eight prompts show what 7.85 / 8 = 0.98 nats can buy
        ((1.0, 0.0), 1.1, ""),  # it was spent on what the judge does not measure, which is said otherwise
        ((0.0, 1.0), 1.1, ""),
        ((0.0, -1.0), 1.1, ""),
    ],
)
def test_a_kl_that_bought_nothing_is_said(
    tmp_path: Path, gains: tuple[float, float | None], kl: float, said: str
) -> None:
    out = recorded_runs.run(tmp_path / "run", gains)
    metrics = out / "step3_ppo/metrics.jsonl"
    row = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
    with metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"eval_kl": kl, "eval_kl_ci95": 0.1 * (kl > 1)}) + "\n")
    cautions = " ".join(judge(read_runs([str(out)], DECLARATIONS)[0]).cautions)
    assert ("spent on noise" in cautions) == bool(said)
    assert said in cautions and (not said or "the policy moved by 1.10 ± 0.10 nats per response" in cautions)


@pytest.mark.parametrize("follows_length", [True, False])
def test_a_gain_that_length_explains_is_no_better_policy(tmp_path: Path, follows_length: bool) -> None:
    """Long responses win and short ones lose; or all win alike."""
    words = [3, 30, 4, 28, 5, 31, 6, 29] * 2
    out = recorded_runs.run(tmp_path / "run", (1.0, 0.0), ["x " * n for n in words])
    samples = out / "step3_ppo/samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    for row, n in zip(rows, words, strict=True):
        row["judge"] = row["judge_before"] + (-0.05 if follows_length and n < 10 else 1.0)
    unscored = [rows[1] | {"judge": None}, rows[0] | {"judge_before": None}]  # they say nothing of either
    rows = [unscored[0], *rows, unscored[1]]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    verdict = judge(read_runs([str(out)], DECLARATIONS)[0])
    assert any("at equal length the win rate is" in caution for caution in verdict.cautions) == follows_length
    assert verdict.headline == (
        "The judge rose, but length may explain it." if follows_length else "The policy got better."
    )
    assert verdict.tone == ("unsure" if follows_length else "good")
