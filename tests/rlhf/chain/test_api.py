"""`from rlhf import sft, reward, ppo, train`: the options that arrive, errors, functions as rewards."""

import functools
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import rlhf
from rlhf.chain import alone, api
from rlhf.chain import command as chain
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.evaluation.pairs import PairsConfig
from rlhf.plugins import load_file, parse_spec
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.__main__ import options_of_the_algorithm
from tests.docs.test_python_blocks import PAGES, blocks

Calls = list[Any]
STAGES = {"sft": (1, lambda _: SFTConfig), "reward": (2, lambda _: RewardConfig), "ppo": (3, options_of_the_algorithm)}


def score(prompts: list[str], responses: list[str]) -> list[float]:
    return [0.0 for _ in responses]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """The resolved options of each call. A call runs nothing: its stages have a manifest and a model's folder."""
    recorded: Calls = []

    def run(command: list[str], mistake: str) -> int:
        assert command[1:4] == ["-P", "-m", "rlhf"] and command[5:-1] == ["--config"]
        verb, argv = command[4], command[5:]
        if verb == "train":
            options = chain.read(argv)
        else:
            step, options_of = STAGES[verb]
            read = alone.read_command(step, options_of, argv, verb)
            assert read is not None
            options = read.chain
        recorded.append(options)
        for step in options.steps or (3,):
            folder = Path(options.output_dir) / chain.STAGES[step].name
            (folder / "model").mkdir(parents=True, exist_ok=True)
            metrics = {
                "eval_perplexity": 1.5,
                "eval_score": 2.0,
                "eval_score_before": 1.0,
                "eval_accuracy": 0.9,
                "eval_judge": 0.5,
            }
            (folder / "manifest.json").write_text(json.dumps({"metrics": metrics}))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_call", run)
    monkeypatch.setattr("rlhf.storage.manifests.read_manifest", lambda d: json.loads((d / "manifest.json").read_text()))
    return recorded


def test_importing_the_functions_imports_no_torch() -> None:
    program = "import sys, rlhf; assert len(sys.modules) < 200; from rlhf import ppo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert all(callable(getattr(rlhf, name)) for name in rlhf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'dpo'"):
        _ = rlhf.dpo  # type: ignore[attr-defined]


def test_options_arrive(calls: Calls, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    tuned = rlhf.sft(model="gpt2", data_path="a.jsonl", output_dir="out", learning_rate=1e-3, num_gpus=2)
    assert (calls[0].steps, calls[0].num_gpus, calls[0].output_dir) == ((1,), 2, str(tmp_path / "out"))
    section = calls[0].sft
    assert (section.model, section.data_path, section.learning_rate) == ("gpt2", ("a.jsonl",), 1e-3)
    assert section.output_dir == str(tmp_path / "out")
    expected = (tmp_path / "out/step1_sft", tmp_path / "out/step1_sft/model", 1.5)
    assert (tuned.directory, tuned.model, tuned.metrics["eval_perplexity"]) == expected
    objective = "pairwise,centering=0.1"
    out = tmp_path / "out"
    reward_run = rlhf.reward(model="gpt2", data_path=["a.jsonl", "b.jsonl"], output_dir=out, objective=objective)
    section = calls[1].reward
    assert (calls[1].steps, section.data_path, section.objective) == ((2,), ("a.jsonl", "b.jsonl"), objective)
    policy = rlhf.ppo(
        model=tuned.model,
        reward_model=reward_run.model,
        data_path="a.jsonl",
        output_dir="out",
        algorithm="grpo",
        reward=["learned", score],
        critic={"zero_stage": 3},
    )
    ppo = calls[2].ppo
    assert (ppo.algorithm, ppo.actor_model, ppo.reward_model) == ("grpo", str(tuned.model), str(reward_run.model))
    assert ppo.reward == ("learned", f"{Path(__file__).absolute()}:score") and ppo.critic.zero_stage == 3
    assert policy.model == tmp_path / "out/step3_ppo/actor"


def test_values_of_python_that_a_command_line_does_not_have(calls: Calls, tmp_path: Path) -> None:
    rlhf.sft(
        model="a", data_path="b", output_dir="out", learning_rate=np.float64(1e-3), seed=np.int64(3), data_split="2,4,4"
    )
    section = calls[0].sft
    assert (section.learning_rate, section.seed, section.data_split) == (1e-3, 3, (2.0, 4.0, 4.0))
    rlhf.train(actor_model="a", reward_model="b", data_path="c", output_dir="out", steps=3)
    assert calls[1].steps == (3,)


def test_a_secret_is_refused_before_anything_is_written(calls: Calls, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data-path: got what looks like a token or a password"):
        rlhf.sft(model="a", data_path="https://me:pass1234@host/x.jsonl", output_dir="out")
    assert not calls and list(tmp_path.rglob("*.yaml")) == []


def test_a_function_in_a_directory_with_a_comma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a,b/mine.py").write_text("def score(prompts, responses): return []")
    spec = api._function_name(load_file(str(tmp_path / "a,b/mine.py")).score)
    assert parse_spec(spec) == ("python", {"function": f"{tmp_path}/a,b/mine.py:score"})


def points(prompts: list[str], responses: list[str]) -> list[float]:
    return []


@functools.wraps(points)
def less(prompts: list[str], responses: list[str]) -> list[float]:
    return [-x for x in points(prompts, responses)]


@pytest.mark.parametrize("function", [lambda prompts, responses: [], Path("a").exists, len, less])
def test_a_function_without_a_name_in_a_file_is_refused(function: Callable[..., Any], calls: Calls) -> None:
    with pytest.raises(UserError, match="expected a function at the top of a Python file") as refused:
        rlhf.ppo(data_path="a", output_dir="out", reward=function)
    assert "\n" not in str(refused.value) and not calls


ENDS = "import sys; from rlhf import errors\ndef main(): raise errors.UserError('a: got b')\n"


def test_how_a_call_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A real process: its output is shown, a mistake is a UserError, another end a RunError."""
    call = api._call
    programs = (ENDS + "print('seen'); errors.run_program(main)", "print('seen'); raise SystemExit(75)")
    for program, kind, message in zip(programs, (UserError, rlhf.RunError), ("^a: got b$", "code 75"), strict=True):
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(api, "_call", lambda _, mistake, command=command: call(command, mistake))
        with pytest.raises(kind, match=message):
            rlhf.sft(model="m", data_path="d", output_dir=tmp_path)
        assert capfd.readouterr().out == "seen\n"
    monkeypatch.setenv(api.MISTAKE_FILE, "file")
    with pytest.raises(UserError, match="if __name__ == '__main__'"):
        rlhf.sft(model="m", data_path="d", output_dir=tmp_path)


def test_the_file_of_the_page_is_accepted(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "my_run.py").write_text(blocks(PAGES["python.md"])["my_run.py"])
    runpy.run_path(str(tmp_path / "my_run.py"), run_name="__main__")
    assert [options.steps for options in calls] == [(1,), (3,)]
    assert calls[1].ppo.reward == (f"{tmp_path / 'my_run.py'}:short",)


def test_the_rounds_of_the_page_add_their_pairs_and_go_on(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it labels the pairs of round 1, the file labels those alone when it runs again."""
    labelled: list[str] = []

    def run(command: list[Any], check: bool) -> None:
        assert check and command[1:4] == ["-m", "rlhf", "pairs"]
        options = parser.parse(PairsConfig, list(map(str, command[4:])), "", "")
        if len(labelled) == 1 and not labelled[0].startswith("killed"):
            labelled[:] = [f"killed after {labelled[0]}"]
            raise subprocess.CalledProcessError(137, "rlhf pairs")
        labelled.append(Path(options.output).name)
        Path(options.output).write_text("{}")

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "old.jsonl").touch()
    (tmp_path / "rounds.py").write_text(blocks(PAGES["online_preferences.md"])["rounds.py"])
    with pytest.raises(subprocess.CalledProcessError):
        runpy.run_path(str(tmp_path / "rounds.py"), run_name="__main__")
    calls.clear()
    runpy.run_path(str(tmp_path / "rounds.py"), run_name="__main__")
    assert labelled == ["killed after pairs-0.jsonl", "pairs-1.jsonl"]
    assert [(Path(options.output_dir).name, *options.steps) for options in calls] == [
        ("round-0", 1), *((f"round-{number}", step) for number in range(3) for step in (2, 3))
    ]  # fmt: skip
    assert [[Path(path).name for path in options.reward.reward_only_data_path] for options in calls[1::2]] == [
        [], ["pairs-0.jsonl"], ["pairs-0.jsonl", "pairs-1.jsonl"]
    ]  # fmt: skip
    starts = {options.ppo.actor_model for options in calls[2::2]} | {options.reward.model for options in calls[1::2]}
    assert [Path(start).parts[-3:] for start in starts] == [("round-0", "step1_sft", "model")]


@pytest.mark.long
def test_the_file_of_the_page_trains_the_demo(tmp_path: Path) -> None:
    (tmp_path / "my_run.py").write_text(blocks(PAGES["python.md"])["my_run.py"])
    done = subprocess.run(
        [sys.executable, "my_run.py"], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, path = done.stdout.split("the policy is ")
    assert AutoModelForCausalLM.from_pretrained(path.strip()).num_parameters() > 0
    assert "score " in done.stdout and "perplexity " in done.stdout
