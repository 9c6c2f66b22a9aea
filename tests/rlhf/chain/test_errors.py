"""A user's mistake is one line, exit code 2, in time, and leaves nothing behind."""

import importlib.util
import json
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file

from rlhf import console, errors
from rlhf.chain import command as train
from rlhf.chain.options import ChainConfig, chain_config, typed_names
from rlhf.config import option_names, options, parser
from rlhf.hub import offline
from rlhf.launch import launcher
from rlhf.launch.supervisor import ExitStatus
from rlhf.storage import manifests
from rlhf.training import stage_process
from rlhf.training.record import Recorder
from step1_sft import __main__ as sft
from step2_reward import __main__ as reward
from step3_ppo import __main__ as ppo
from step3_ppo.algorithms import ppo as ppo_algorithm
from step3_ppo.warnings import RULES
from tests.support import forked_ranks
from tests.support.programs import runner, without_status

ROOT = Path(train.__file__).parents[2]
DEMO = ["--max-length", "48", "--max-prompt-length", "24", "--data-path", "demo,rows=2000"]
LIMIT_S = 15


@pytest.fixture(autouse=True)
def libraries_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs run in this process: what they do to its libraries stays out of other tests."""
    monkeypatch.setattr(console, "quiet_libraries", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Run a program that must refuse; the line it says."""

    def run(main: Callable[[], Any], *argv: str, out: str | None = None) -> str:
        def refuse(*_: Any) -> int:
            raise AssertionError("a stage was started")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(launcher, "run", refuse)
        monkeypatch.setattr(sys, "argv", ["program", *argv, "--output-dir", out or "out"])
        before, start = sorted(tmp_path.rglob("*")), time.process_time()
        try:
            code = errors.run_as_user(main)
        except SystemExit as leaving:
            code = int(str(leaving.code))
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, ""), captured
        line = without_status(captured.err)
        assert line.startswith("error: ") and line.count("\n") == 1, captured.err
        assert time.process_time() - start < LIMIT_S
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return line

    return run


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--deployment-type single_node --num-processes 4096", ["--num-processes 4096", "cores", "at most"]),
        (
            "--plan --deployment-type single_node --num-processes 4096",
            ["--num-processes 4096", "at most", "; to plan for another machine, --devices N --device KIND"],
        ),
        ("--num_gpus 4096", ["--num-gpus 4096", "cores", "at most"]),
    ],
)
def test_more_processes_than_this_machine_has(words: str, parts: list[str], mistake: Callable[..., str]) -> None:
    """What every machine answers alike: tests/golden/errors.txt."""
    message = mistake(train.main, *words.split(), "--data-path", "demo,rows=2000")  # fewer than the demo has
    assert all(part in message for part in parts)


@pytest.mark.parametrize("path", ["file", "file/below"])
@pytest.mark.parametrize("main", [train.main, sft.main], ids=["train", "step1_sft"])
def test_a_directory_that_cannot_be_made(
    main: Callable[[], Any], path: str, mistake: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert f"--output-dir {path}: cannot write there" in mistake(main, out=path)


@pytest.mark.parametrize("main", [train.main, sft.main], ids=["train", "step1_sft"])
def test_a_directory_that_is_none(main: Callable[[], Any], mistake: Callable[..., str]) -> None:
    """Before, `s3://bucket/run` became the local directory s3:/bucket/run, and the empty word the root."""
    for out in ("s3://bucket/run", "gs://x"):
        message = mistake(main, out=out)
        assert "--output-dir: expected a directory on a disk or a mounted" in message and f"got '{out}'" in message
    with pytest.raises(errors.UserError, match="--output-dir: expected a directory, got ''"):
        parser.parse(options.RunOptions, ["--output-dir="], "", "")
    assert "File name too long" in mistake(main, out="x" * 256)


def test_the_home_directory_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No shell expands --output-dir=~/x, and a run in a directory called ~ ends with `rm -r ~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.yaml").write_text("seed: 7\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--output-dir=~/x", "--print-config"])
    train.main()
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["output_dir"], shown["ppo"]["output_dir"], shown["seed"]) == (f"{tmp_path}/x", f"{tmp_path}/x", 7)
    (tmp_path / "a.yaml").write_text("actor_model: ~/a\nppo: {reward_model: ~/b, critic_model: ~/c}\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", f"{tmp_path}/a.yaml", "--print-config"])
    train.main()
    shown = yaml.safe_load(capsys.readouterr().out)
    assert {shown["actor_model"], shown["sft"]["model"], shown["reward"]["model"]} == {f"{tmp_path}/a"}
    assert (shown["ppo"]["reward_model"], shown["ppo"]["critic_model"]) == (f"{tmp_path}/b", f"{tmp_path}/c")
    assert manifests.resolve_model_path("~/a") == f"{tmp_path}/a"  # of a score source or a policy


@pytest.mark.parametrize(
    ("row", "source", "parts"),
    [
        (
            {"picture": "a"},
            "",
            ["data.jsonl:1", "got the columns picture", "chosen=COLUMN,rejected=COLUMN", "none of the first 1000"],
        ),
        (
            {"prompt": "a", "response": "b"},
            "",
            ["step2_reward", "data.jsonl", "0 usable rows", "no rejected side"],
        ),
    ],
)
def test_data_without_what_a_stage_needs(
    row: dict[str, Any], source: str, parts: list[str], mistake: Callable[..., str], tmp_path: Path
) -> None:
    rows = [row | {"prompt": f"a{i}"} if "prompt" in row else row for i in range(2000)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    message = mistake(train.main, "--data-path", f"{source}data.jsonl")
    for part in parts:
        assert part in message


@pytest.fixture(params=["refuses", "is silent"])
def dead_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub that cannot be reached, in both ways that happens."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if request.param == "refuses":
            silent.close()
        monkeypatch.setattr(offline, "HUB_TIMEOUT", 0.5)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        yield


@pytest.mark.parametrize(
    ("main", "argv", "name"),
    [
        (train.main, ["--actor-model", "opt-125m", "--reward-model", "opt-125m"], "facebook/opt-125m"),
        (train.main, ["--actor-model", "opt1.3b", "--reward-model", "gpt2"], "(did you mean 'opt-1.3b'?)"),
        (train.main, ["--data-path", "hh_rlhf:Anthropic/hh-rlhf"], "Anthropic/hh-rlhf"),
        (train.main, ["--data-path", "someone/pairs"], "someone/pairs"),
        (sft.main, ["--model", "someone/model", "--data-path", "demo"], "someone/model"),
    ],
    ids=["model", "near a model", "data by source", "data", "stage"],
)
def test_the_hub_does_not_answer(
    main: Callable[[], Any], argv: list[str], name: str, mistake: Callable[..., str], dead_hub: None
) -> None:
    message = mistake(main, *argv)
    assert name in message and "hub" in message and "local path" in message


# --- stages alone


def test_an_unfinished_or_damaged_stage_is_no_input(mistake: Callable[..., str], tmp_path: Path) -> None:
    stage = tmp_path / "earlier" / "step1_sft"
    (stage / "model").mkdir(parents=True)
    save_file({"w": torch.zeros(3)}, stage / "model" / "model.safetensors")
    (stage / "config.yaml").write_text("seed: 0")
    (stage / "metrics.jsonl").write_text("")
    for path in ("earlier/step1_sft", "earlier/step1_sft/model"):
        assert "earlier/step1_sft: unfinished stage" in mistake(reward.main, "--model", path, *DEMO)
    assert "unfinished stage" in mistake(train.main, "--actor-model", "earlier/step1_sft", *DEMO)
    content = {"stage": "step1_sft", "inputs": {}, "models": ["model"], "metrics": {}, "config": {}}
    files = manifests.file_digests(stage, ["model"])
    manifests.write_manifest(stage / "manifest.json", content | {"files": files})
    save_file({"w": torch.ones(3)}, stage / "model" / "model.safetensors")
    critic = ["--reward-model", "demo-llama"]
    for main, argv in ((reward.main, ["--model"]), (ppo.main, [*critic, "--actor-model"])):
        message = mistake(main, *argv, "earlier/step1_sft", *DEMO)
        assert "model.safetensors: damaged, its content differs" in message


def test_a_tracker_that_is_not_installed(mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "wandb" else find_spec(name, *_))
    for main in (train.main, sft.main):
        assert "--report-to wandb: the package is not installed; pip install wandb" in mistake(
            main, "--report-to", "wandb"
        )


# --- what goes wrong inside a stage


def unfinished(tmp_path: Path) -> bool:
    out = tmp_path / "out"
    return not list(out.rglob("manifest.json")) and not (out / "step2_reward").exists()


def test_a_crash_names_the_stage_and_starts_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def crash(module: str, words: list[str], target: object) -> ExitStatus:
        started.append(module)
        return ExitStatus(7, "rank 0: exit code 7", crashed=True)

    monkeypatch.setattr(launcher, "run", crash)
    options = ["--output-dir", f"{tmp_path}/out", "--max-eval-rows", "8", "--data-path", "demo,rows=2000"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *options])
    code, _, error = runner("train.py", train.main, monkeypatch, capsys)(*options)
    command, last = error.splitlines()[-2:]
    assert (code, started) == (7, ["step1_sft"])
    assert last.startswith(
        "step1_sft did not finish: rank 0: exit code 7, before its first step; it starts from scratch"
    )
    assert command == f"to resume: python train.py {' '.join(options)}"
    assert unfinished(tmp_path)


def test_a_number_that_is_not_finite_is_one_line(tmp_path: Path) -> None:
    options = ["--model", "demo-llama", *DEMO, "--max-eval-rows", "8", "--learning-rate", "1e30"]
    program = ("tests.support.one_process", "step1_sft")
    ended = forked_ranks.finish(*program, *options, "--output-dir", str(tmp_path / "out"))
    assert 3 in ended.codes and set(ended.codes) <= {3, None}
    first, other = (without_status(error).splitlines() for error in ended.err)
    assert len(first) == 1 and not other
    assert first[0].startswith("error: step1_sft: step ") and "--learning-rate" in first[0]
    assert unfinished(tmp_path)


def test_a_stage_in_a_chain_says_its_options_as_they_are_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line, in a warning and its file, and in its last error."""
    chain = ChainConfig(ppo=ppo_algorithm.Config())
    names, recorder = typed_names(chain, "ppo"), Recorder(tmp_path)
    typed = {*option_names(chain_config([]))}
    for rule in RULES:
        with console.option_names(names):
            recorder.warn(1, rule.name, {}, rule.advice.format(closer="raise --kl-coef"))
        assert {*re.findall(r"--([\w.-]+\w)", capsys.readouterr().out)} <= typed
    recorder.close()
    assert "raise --ppo.kl-coef" in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    with console.option_names(names | typed_names(chain, "sft")):
        console.say("--model, --max-length, --kl-coefficient, x--kl-coef and --kl-coef 1")
        with pytest.raises(SystemExit):
            stage_process.give_up("error: --kl-coef", 2)
    said = capsys.readouterr()
    expected = "--actor-model, --max-length, --kl-coefficient, x--kl-coef and --ppo.kl-coef 1\n"
    assert (said.out, said.err) == (expected, "error: --ppo.kl-coef\n")
    console.say("--kl-coef")
    assert capsys.readouterr().out == "--kl-coef\n"
