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
            "as good as the best of 45 before training (between 31 and 60); by the judge, as good as the best of 50 "
            "(between 35 and more than 64).",
            "needs 2.83 nats for this score; the gain is 0.910 ± 0.050 of what",
        ),
        (
            (2.38, 1.5, 3.0, 1.0, 1.0, 1.0, 0.31),
            "as good as the best of 2.4 before training (between 1.5 and 3); by the judge, no better than one.",
            "needs 0.287 nats for this score; the gain is 0.310 ± 0.050 of what best-of-n gains at this KL. "
            "Half the learning rate and four times the episodes come closer.",
        ),
        (
            (64.0, 64.0, 64.0, None, None, None, 1.2),
            "as good as the best of more than 64 before training.",
            "needs more than 3.17 nats for this score; the gain is 1.200 ± 0.050 of what",
        ),
        ((1.0, 1.0, 1.5, None, None, None, -0.1), "no better than one before training (between 1 and 1.5).", ""),
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
    assert f"One response is now {worth}" in verdict.sentence
    assert enough in verdict.evidence[-1] and (enough != "") == ("Best-of-n" in verdict.evidence[-1])
    row["eval_best_of"] = 45.5  # whose KL, 2.84, is below that of the run
    assert ("come closer" in verdict.evidence[-1]) == (numbers[-1] == 0.31)
    assert ("at most" in told().evidence[-1]) == (enough != "")
    del row["eval_best_of"]
    assert "One response" not in (verdict := told()).sentence and "Best-of-n" not in verdict.evidence[-1]
