"""What the verdict says of the samples before training that one response is worth."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain.stages import STAGES
from rlhf.report.records import read_runs
from rlhf.report.verdict import judge
from tests.support import recorded_runs


@pytest.mark.parametrize(
    ("numbers", "worth", "enough"),
    [
        (  # 2.83 = ln 45.2 - 44.2 / 45.2; the run's KL is 3.035
            (45.2, 31.0, 60.0, 50.0, 35.4, 64.0, 0.91),
            "45 (95 %: 31 to 60) by the score; 50 (95 %: 35 or more) by the judge.",
            "KL of 2.83 nats for this score. At the same KL, the tuned policy has 0.910 ± 0.050 times",
        ),
        (
            (2.38, 1.5, 3.0, 1.0, 1.0, 1.0, 0.31),
            "2.4 (95 %: 1.5 to 3) by the score; one by the judge.",
            "At the same KL, the tuned policy has 0.310 ± 0.050 times the gain of best-of-n. "
            "Half the learning rate and four times the episodes come closer.",
        ),
        (
            (64.0, 64.0, 64.0, None, None, None, 1.2),
            "64 or more by the score.",
            "KL of 3.17 nats or more for this score. At the same KL, the tuned policy has 1.200 ± 0.050 times",
        ),
        ((1.0, 1.0, 1.5, None, None, None, -0.1), "one (95 %: 1 to 1.5) by the score.", ""),
    ],
)
def test_what_a_response_is_worth_is_said(numbers: Any, worth: str, enough: str, tmp_path: Path) -> None:
    recorded_runs.reinforcement(tmp_path / "run/step3_ppo", (1.0, 0.5))
    path = tmp_path / "run/step3_ppo/metrics.jsonl"
    *earlier, last = path.read_text(encoding="utf-8").splitlines()
    names = [f"eval_{source}_worth_{name}" for source in ("score", "judge") for name in ("best_of", "low", "high")]
    row = json.loads(last) | dict(zip([*names, "eval_score_efficiency"], numbers, strict=True))
    row |= {"eval_score_efficiency_ci95": 0.05, "eval_best_of": 64.0}

    def told() -> Any:
        path.write_text("\n".join([*earlier, json.dumps(row)]) + "\n", encoding="utf-8")
        return judge(read_runs([str(tmp_path / "run")], [*STAGES.values()])[0])

    verdict = told()
    assert f"keep the one with the best score: {worth}" in verdict.sentence
    assert enough in verdict.worth[-1] and (enough != "") == ("Best-of-n" in verdict.worth[-1])
    row["eval_best_of"] = 45.5  # whose KL, 2.84, is below that of the run
    assert ("come closer" in verdict.worth[-1]) == (numbers[-1] == 0.31)
    assert ("at equal KL the ratio is lower" in told().worth[-1]) == (enough != "")
    del row["eval_best_of"]
    assert told().worth == ()


def test_what_it_cost_is_said(tmp_path: Path) -> None:
    """After the KL; and nothing of a number without its value before."""
    recorded_runs.reinforcement(tmp_path / "run/step3_ppo", (1.0, 0.5))
    path = tmp_path / "run/step3_ppo/metrics.jsonl"
    *earlier, last = path.read_text(encoding="utf-8").splitlines()
    row = json.loads(last) | {"eval_perplexity": 2.31, "eval_choices_before": 0.61, "eval_choices": 0.58}

    def evidence(**more: float) -> Any:
        path.write_text("\n".join([*earlier, json.dumps(row | more)]) + "\n", encoding="utf-8")
        return judge(read_runs([str(tmp_path / "run")], [*STAGES.values()])[0]).evidence

    answers = "multiple choice, right answers 61 % → 58 %"
    assert evidence()[-1] == f"Cost: {answers}."
    whole = evidence(eval_perplexity_before=2.2, eval_choices_gain_ci95=0.041)
    assert whole[-1] == f"Cost: perplexity of demonstrations 2.2 → 2.31; {answers} (a change of −3.0 ± 4.1 %)."
