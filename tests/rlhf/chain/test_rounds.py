"""`rlhf rounds`: two rounds on a tiny world, interrupted between them, and what is refused."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.chain import command, rounds
from rlhf.evaluation import pairs
from rlhf.launch.launcher import ExitStatus
from tests.support import programs, stages_here

SMALL = [
    *("--data-path", "demo,rows=400", "--sft.num-train-epochs", "2", "--reward.num-train-epochs", "1"),
    *("--ppo.total-episodes", "32", "--ppo.batch-size", "32", "--ppo.eval-samples", "4", "--max-eval-rows", "8"),
]
JUDGES = """# judges.py: two that agree, and one that does not
def kind(prompts, responses): return [response.count("kind") + len(response) / 100 for response in responses]
def long(prompts, responses): return [len(response) for response in responses]
def short(prompts, responses): return [-len(response) for response in responses]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(the program in this process, every stage and every call of `rlhf pairs` so far)."""
    calls: list[str] = []

    def stage(step: int, options: Any, run: object) -> int:
        calls.append(f"{Path(options.output_dir).name} {step}")
        return stages_here.run_stage(step, options, run)

    def label(_: str, argv: list[str]) -> ExitStatus:
        calls.append(Path(argv[argv.index("--output") + 1]).name)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["rlhf pairs", *argv[1:]])
            return ExitStatus(pairs.main(), "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run_stage", stage)
    monkeypatch.setattr(rounds.launcher, "run", label)
    Path("judges.py").write_text(JUDGES)
    prompts = [f"tell me about the {color} {animal} in the valley" for color in ("red", "blue", "grey", "pink")
               for animal in ("fox", "owl", "bear", "wolf", "cat", "dog")]  # fmt: skip
    Path("prompts.txt").write_text("\n".join(prompts))
    return programs.runner("rlhf rounds", rounds.main, monkeypatch, capsys), calls


def test_rounds_add_their_pairs_and_go_on_where_they_were_killed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program, calls = run
    words = ["--output-dir", "runs/r", "--prompts", "prompts.txt", "--label", "judges.py:kind", "judges.py:long"]
    words += ["judges.py:short", *SMALL]
    train = command.main

    def killed() -> int:
        if "--steps" in sys.argv:
            raise SystemExit(137)
        return train()

    with monkeypatch.context() as patch:
        patch.setattr(rounds.command, "main", killed)
        assert program(*words)[0] == 137
    first = ["round-0 1", "round-0 2", "round-0 3", "pairs-0.jsonl"]
    assert calls == first
    code, out, err = program("--output-dir", "runs/r")  # the options are those of rounds.yaml
    assert code == 0, err
    assert calls == [*first, "round-1 2", "round-1 3"]
    assert len(re.findall(r"runs/r/round-[01]: eval_accuracy \S+, eval_score_before", out)) == 2
    labelled = [json.loads(line) for line in Path("runs/r/pairs-0.jsonl").read_text().splitlines()]
    assert labelled and all((row["score_chosen"], row["score_rejected"]) == (2.0, 1.0) for row in labelled)
    manifest = json.loads(Path("runs/r/round-1/step2_reward/manifest.json").read_text())
    assert manifest["config"]["reward_only_data_path"] == ["runs/r/pairs-0.jsonl"]
    tuned = json.loads(Path("runs/r/round-1/step3_ppo/manifest.json").read_text())["config"]
    assert tuned["actor_model"] == "runs/r/round-0/step1_sft"
    code, _, err = program("--output-dir", "runs/r", "--label", "judges.py:long")
    assert code == 2 and "--label: got ['judges.py:long'], expected ['judges.py:kind'" in err
    code, _, err = program("--output-dir", "runs/r", "--sft.learning-rate", "0.5")
    assert code == 2 and "learning_rate was" in err
    assert program("--output-dir", "runs/r")[0] == 0 and len(calls) == 6  # nothing runs again, nor was it forgotten
    Path("runs/r/pairs-0.jsonl").write_text("")
    code, _, err = program("--output-dir", "runs/r")
    assert code == 2 and "runs/r/pairs-0.jsonl: has no pairs; remove it" in err


def test_rounds_from_a_policy_and_with_other_pairs_of_the_reward_model(run: Any) -> None:
    """Round 0 fine-tunes nothing, and every round starts from that policy; the pairs of the section are kept."""
    program, calls = run
    words = [
        "--rounds",
        "1",
        "--output-dir",
        "runs/first",
        "--prompts",
        "prompts.txt",
        "--label",
        "judges.py:kind",
        *SMALL,
    ]
    assert program(*words)[0] == 0
    Path("more.jsonl").write_text('{"prompt": "who is kind", "chosen": "the fox", "rejected": "no one"}\n')
    words[3], policy = "runs/second", "runs/first/round-0/step1_sft"
    words += [
        "--rounds",
        "2",
        "--ppo.actor-model",
        policy,
        "--reward.reward-only-data-path",
        "demo,rows=400",
        "more.jsonl",
    ]
    code, _, err = program(*words)
    assert code == 0, err
    assert [call for call in calls if call.endswith(" 1")] == ["round-0 1"]
    tuned = json.loads(Path("runs/second/round-1/step3_ppo/manifest.json").read_text())["config"]
    learned = json.loads(Path("runs/second/round-1/step2_reward/manifest.json").read_text())["config"]
    assert tuned["actor_model"] == policy
    assert learned["reward_only_data_path"] == ["demo,rows=400", "more.jsonl", "runs/second/pairs-0.jsonl"]


def test_a_round_without_a_reward_model_has_a_summary(run: Any) -> None:
    words = [
        "--rounds",
        "1",
        "--output-dir",
        "runs/r",
        "--ppo.algorithm",
        "rloo",
        "--ppo.reward",
        "judges.py:kind",
        *SMALL,
    ]
    code, out, err = run[0](*words)
    assert code == 0, err
    assert re.search(r"runs/r/round-0: eval_score_before", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--rounds 2: expected --prompts FILE and --label SOURCE"),
        (["--prompts", "none.txt", "--label", "length"], "--prompts none.txt: cannot be read (No such file"),
        (["--prompts", "prompts.md", "--label", "length"], "--prompts prompts.md: expected a .jsonl file"),
        (
            ["--prompts", "asks.txt", "--label", "length,target=9", "--data-path", "demo=0.5", "demo,seed=1=0.5"],
            "--data-path demo=0.5: got a weight, expected none",
        ),
        (
            [
                "--prompts",
                "asks.txt",
                "--label",
                "length,target=9",
                "--reward.data-path",
                "demo=0.5",
                "demo,seed=1=0.5",
            ],
            "--data-path demo=0.5: got a weight, expected none",
        ),
        (["--prompts", "asks.txt", "--label", "jugdes.py:kind"], "jugdes.py: no such Python file"),
        (["--prompts", "asks.txt", "--label", "learned"], "learned: no reward model is named"),
        (["--prompts", "asks.txt", "--label", "learned,model=nowhere"], "nowhere"),
        (
            ["--prompts", "asks.txt", "--label", "judges.py:kind", "--ppo.algorithm", "rloo", "--ppo.reward", "vader"],
            "--rounds 2: step 3 uses no reward model of the run",
        ),
        (["--rounds", "1", "--steps", "3"], "--steps: got it with rounds, expected none"),
        (["--rounds", "1", "--overwrite"], "--overwrite: got it with rounds"),
        (["--rounds", "1", "--reward-models", "a=x", "b=y"], "--reward-models: got it with rounds"),
    ],
)
def test_what_is_refused(words: list[str], message: str, run: Any) -> None:
    """Before the first round, which may take hours."""
    Path("asks.txt").write_text("tell me about the red fox\n")
    code, _, err = run[0](*words)
    assert code == 2 and message in err
