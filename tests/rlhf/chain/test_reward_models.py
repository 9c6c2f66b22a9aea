"""`--reward-models`: two reward models in one chain, each on its own pairs, and step 3 by the rule of Llama 2."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import rewards
from rlhf.chain import chat, command, reward_models
from rlhf.chat.session import open_session
from rlhf.errors import UserError
from rlhf.rewards import Scoring
from tests.support import programs, stages_here

SMALL = [
    *("--data-path", "demo,rows=400", "--sft.num-train-epochs", "1", "--reward.num-train-epochs", "1"),
    *("--ppo.total-episodes", "32", "--ppo.batch-size", "32", "--ppo.eval-samples", "4", "--max-eval-rows", "8"),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(train.py in this process, the stages that it has run)."""
    calls: list[str] = []

    def stage(step: int, options: Any, run: object) -> int:
        calls.append(f"{Path(options.output_dir).name} {step}")
        return stages_here.run_stage(step, options, run)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run_stage", stage)
    return programs.runner("train.py", command.main, monkeypatch, capsys), calls


def test_two_reward_models_are_trained_and_the_safe_one_comes_first(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a chat with the run, which was moved, scores as training did."""
    program, calls = run
    words = [
        "--reward-models",
        "helpful=demo,rows=400",
        "safe=demo,rows=400,seed=1",
        "--output-dir",
        "runs/two",
        *SMALL,
    ]
    code, output, err = program(*words)
    assert code == 0, err
    assert output.count("next:") == 1 and output.count("The tuned policy is runs/two/step3_ppo/actor") == 1
    assert calls == ["two 1", "reward-helpful 2", "reward-safe 2", "two 3"]
    config = json.loads(Path("runs/two/step3_ppo/manifest.json").read_text())["config"]
    models = [f"runs/two/reward-{name}/step2_reward" for name in ("safe", "helpful")]
    assert config["reward"] == [f"learned,model={model}" for model in models]
    assert (config["reward_combine"], config["reward_model"]) == ("safety", models[1])
    trained = json.loads(Path("runs/two/reward-safe/step2_reward/manifest.json").read_text())["config"]
    assert trained["data_path"] == ["demo,rows=400,seed=1"]
    assert program(*words)[0] == 0 and len(calls) == 4  # finished stages are skipped
    Path("runs").rename("moved")
    moved = tuple(f"learned,model=moved/two/reward-{name}/step2_reward" for name in ("safe", "helpful"))
    assert reward_models.scoring_of(Path("moved/two")) == Scoring(moved, "safety", 0.15)
    options, opened = chat.open_run(["moved/two", "--dtype", "fp32"], "rlhf chat")
    session = open_session(options, opened)
    session.ask("tell me about the red fox")
    [score] = session.score()
    response = session.turn.responses[0] if session.turn else None
    assert response is not None
    samples = rewards.as_samples(response.rollout, session.models.tokenizer)
    context = rewards.Context(session.models.tokenizer, torch.device("cpu"), torch.float32, "", 1)
    safe, helpful = (rewards.open_source(spec, context)(samples).item() for spec in moved)
    assert score == (safe if torch.tensor(safe).sigmoid() < 0.15 else helpful)


def test_an_interrupted_run_goes_on_with_all_its_models(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same command, and by one that names the output directory only."""
    program, calls = run
    models = ["--reward-models", "helpful=demo,rows=400", "safe=demo,rows=400,seed=1"]
    run_stage, allowed = command.run_stage, 0

    def limited(step: int, options: Any, target: Any) -> Any:
        if len(calls) == allowed:
            raise UserError("interrupted")
        return run_stage(step, options, target)

    monkeypatch.setattr(command, "run_stage", limited)
    for allowed, words in ((1, [*models, *SMALL]), (2, models), (4, [])):
        code, _, err = program(*words, "--output-dir", "runs/two")
        assert (code, "interrupted" in err) == ((2, True) if allowed < 4 else (0, False)), err
    assert calls == ["two 1", "reward-helpful 2", "reward-safe 2", "two 3"]
    config = json.loads(Path("runs/two/step3_ppo/manifest.json").read_text())["config"]
    assert (config["reward_combine"], config["total_episodes"], len(config["reward"])) == ("safety", 32, 2)


@pytest.mark.parametrize(
    ("pairs", "in_file", "combination"),
    [
        (("a=p.jsonl", "b=p.jsonl", "c=p.jsonl"), "", ["uncertain"]),
        (("a=p.jsonl", "b=p.jsonl"), "ppo: {reward_combine: min}", []),
        (("a=p.jsonl", "b=q.jsonl"), "", []),
        (("helpful=p.jsonl", "safe=p.jsonl"), "", ["safety"]),
    ],
)
def test_each_model_has_a_seed_of_its_own(
    pairs: tuple[str, ...], in_file: str, combination: list[str], tmp_path: Path
) -> None:
    """Equal seeds would train equal members of an ensemble, which never disagree."""
    (tmp_path / "options.yaml").write_text(in_file or "{}")
    argv = ["--config", str(tmp_path / "options.yaml"), "--output-dir", str(tmp_path / "run")]
    argv += ["--reward-models", *pairs, "--seed", "7"]
    chain, origins = command.read(argv)
    calls: list[list[str]] = []
    reward_models.train(chain, origins, lambda words: calls.append(words) or 0)
    after = [dict(zip(words[::2], words[1::2], strict=False)) for words in calls[1:-1]]
    assert [each["--reward.seed"] for each in after] == [str(7 + k) for k in range(len(pairs))]
    assert [word for name, word in itertools.pairwise(calls[-1]) if name == "--ppo.reward-combine"] == combination


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["helpful=a.jsonl"], "got 1 model, expected two or more"),
        (["helpful", "safe=b"], "--reward-models helpful: expected NAME=PATH"),
        (["a=x", "a=y"], "--reward-models a=y: expected NAME=PATH, each name once"),
        (["a=x", "b=y", "--steps", "2"], "--steps: got it with --reward-models"),
    ],
)
def test_what_is_refused(words: list[str], message: str, run: Any) -> None:
    code, _, err = run[0]("--reward-models", *words)
    assert code == 2 and message in err
