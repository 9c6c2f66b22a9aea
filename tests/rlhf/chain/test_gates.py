"""`--require`: what is a condition, by what it is judged, and how a chain ends that misses one."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain import command, gates
from rlhf.chain.alone import StageAlone
from rlhf.chain.options import ChainConfig
from rlhf.errors import UserError
from rlhf.launch.hosts import Deployment
from rlhf.launch.supervisor import ExitStatus
from step1_sft.config import SFTConfig
from tests.support import forked, recorded_runs

STEP_1 = ("--model", "demo-llama", "--data-path", "demo,rows=200", "--max-prompt-length", "24", "--max-length", "48")


def chain(out: Path, *require: str, **options: Any) -> ChainConfig:
    return ChainConfig(output_dir=str(out), require=require, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval_accuracy above 0.6", "expected a condition such as 'reward.eval_accuracy > 0.6'"),
        ("reward.eval_accuracy > 0.6.1", "expected a condition such as 'reward.eval_accuracy > 0.6'"),
        ("eval_accuracy > 0.6", "expected sft, reward, ppo and a dot before the name of the number"),
        ("rewad.eval_accuracy > 0.6", "expected sft, reward, ppo and a dot before the name of the number"),
        ("reward.eval_acuracy > 0.6", "step2_reward has no held-out number 'eval_acuracy' (did you mean 'eval_accurac"),
        ("reward.eval_perplexity < 4", "step2_reward has no held-out number 'eval_perplexity'"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        gates.read_gates(chain(tmp_path, text))
    assert str(refused.value).startswith(f"--require '{text}': {message}")


def test_names_of_every_stage_are_known(tmp_path: Path) -> None:
    texts = ("sft.eval_perplexity<4", "reward.eval_accuracy > 0.6", "ppo.eval_kl < 1e1", "ppo.eval_judge > -.5")
    read = gates.read_gates(chain(tmp_path, *texts))
    assert [(gate.step, gate.metric, gate.above, gate.bound) for gate in read] == [
        (1, "eval_perplexity", False, 4), (2, "eval_accuracy", True, 0.6),
        (3, "eval_kl", False, 10), (3, "eval_judge", True, -0.5),
    ]  # fmt: skip
    (alone,) = gates.read_gates(StageAlone(steps=(2,), require=("eval_accuracy > 0.6",)))
    assert (alone.step, alone.metric) == (2, "eval_accuracy")


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        # 14 of 20 pairs in the right order: 0.7, and with half a win and half a loss more 15 of 22, +- 0.207
        ("eval_accuracy > 0.45", ""),
        ("eval_accuracy > 0.5", "eval_accuracy is 0.7, and the 95 % interval begins at 0.4"),
        ("eval_accuracy < 0.95", ""),
        ("eval_accuracy < 0.8", "eval_accuracy is 0.7, and the 95 % interval ends at 0.9"),
        ("eval_loss < 0.5", ""),  # a number without an interval
        ("eval_loss > 0.4", "eval_loss is 0.4"),
        ("eval_ece < 0.1", "the run has no such number"),
    ],
)
def test_a_number_is_judged_by_the_near_end_of_its_interval(condition: str, reason: str, tmp_path: Path) -> None:
    stage, metrics = tmp_path / "step2_reward", {"eval_accuracy": 0.7, "eval_loss": 0.4}
    recorded_runs.supervised(stage, metrics, before=False)
    recorded_runs.finish(stage, metrics=metrics)
    scores = {"chosen": [1.0] * 14 + [0.0] * 6, "rejected": [0.5] * 20, "weight": [1.0] * 20}
    (stage / "heldout_scores.json").write_text(json.dumps(scores))
    reasons = gates.reasons(chain(tmp_path, f"reward.{condition}", "sft.eval_perplexity < 1"), 2)
    expected = [] if not reason else [f"--require 'reward.{condition}': {reason}"]
    assert [text[: len(wanted)] for text, wanted in zip(reasons.values(), expected, strict=True)] == expected


def test_a_rehearsal_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_with_restarts", lambda *_: ExitStatus(0))
    wanted = chain(tmp_path, "sft.eval_perplexity < 4")
    for folder, expected in ((tmp_path, (1, gates.MISSED)), (tmp_path / ".rehearsal", None)):
        todo: Any = {1: SFTConfig(output_dir=str(folder))}
        assert command.run_all(wanted, todo, Deployment(1), None) == expected


def test_a_chain_ends_with_its_report_and_goes_on_without_the_condition(tmp_path: Path) -> None:
    """A condition that is met stays, --overwrite does not: it would remove the stage that was judged, which the same
    command judges again."""
    met, missed, out = "eval_perplexity < 1000", "eval_perplexity < 2", str(tmp_path / "out")
    words = ("step1_sft", *STEP_1, "--output-dir", out)
    for once in (["--overwrite"], []):
        ended = forked.program(*words, *once, "--require", met, missed, cwd=tmp_path)
        assert ended.returncode == gates.MISSED, ended.stderr
        assert "report: " in ended.stdout and (tmp_path / "out/report.html").is_file()
        go_on, why = ended.stderr.splitlines()[-2:]
        assert why.startswith(f"step1_sft is finished; then --require '{missed}': eval_perplexity is ")
        going_on = shlex.split(go_on.removeprefix("to go on: "))
        assert going_on[1:] == ["-m", *words, "--require", met]
    again = forked.program(*going_on[2:], cwd=tmp_path)
    assert again.returncode == 0 and "already complete" in again.stdout, again.stderr
