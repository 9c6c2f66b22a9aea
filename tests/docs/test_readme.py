"""What the READMEs tell people to type is accepted, and their examples work."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml

from data.build.mixture import open_origin
from rlhf import rewards
from rlhf.chain import command as train
from rlhf.config import option_names
from rlhf.launch.launcher import SAID
from rlhf.types import Rollout, Samples
from step1_sft import __main__ as sft
from step2_reward import __main__ as reward
from step3_ppo import __main__ as ppo
from tests import tiny
from tests.players import on_course, players, twice_each

ROOT = Path(train.__file__).parents[2]
READMES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("step*/README.md"))]
MAINS = {"step1_sft": sft.main, "step2_reward": reward.main, "step3_ppo": ppo.main}


def commands() -> list[str]:
    """Every line of code that starts as a command does, with what a backslash continues."""
    lines = [line for path in READMES for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()]
    found = [line.strip().removeprefix("$ ").split("  #")[0] for line in lines if not line.startswith(("|", "#"))]
    return sorted({line for line in found if re.match(r"(python|torchrun|make) [\w-]", line)})


def blocks() -> dict[str, str]:
    """The Python files of the README by the name in their first line, exactly as printed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return {code[2:].split()[0].rstrip(":"): code for code in re.findall(r"```python\n(# .*?)```", text, re.DOTALL)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing but the README's Python files, in which the process works."""
    for name, code in blocks().items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_something_to_test() -> None:
    said = "\n".join(commands())
    for word in ("make demo", "make test", "train.py --config", "--steps 2 3", *(f"-m {stage}" for stage in MAINS)):
        assert word in said
    assert set(blocks()) == {"my_dataset.py", "my_reward.py", "my_algorithm.py"}


@pytest.mark.parametrize("command", commands())
def test_a_command_is_accepted(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in words[1:] if "=" not in word)
        return
    (folder / "configs").symlink_to(ROOT / "configs")
    module = words[words.index("-m") + 1] if "-m" in words else ""
    rest = words[words.index(module) + 1 if module else 2 :]
    monkeypatch.setattr(sys, "argv", [words[1], *rest, "--print-config"])
    try:
        (MAINS[module] if module else train.main)()
    except SystemExit as leaving:
        assert leaving.code not in SAID, capsys.readouterr().err
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["output_dir"].startswith("runs/")


@pytest.mark.usefixtures("folder")
def test_the_dataset() -> None:
    rows = list(open_origin("my_dataset.py,rows=3").rows("reward"))
    assert len(rows) == 3
    assert all(row.prompt and row.response and row.rejected and row.response != row.rejected for row in rows)


@pytest.mark.usefixtures("folder")
def test_the_reward_function() -> None:
    nothing = torch.zeros(2, 1, dtype=torch.long)
    rollout = Rollout(nothing, nothing > 0, nothing, nothing == 0, nothing.float(), nothing[:, 0] == 0, rows=())
    samples = Samples(("a", "b"), ("so cheerful", "no"), rollout)
    context = rewards.Context(None, torch.device("cpu"), torch.float32, "", 1)  # type: ignore[arg-type]
    scores = rewards.open_source("my_reward.py:score", context)(samples)
    assert scores.tolist() == pytest.approx([1 - 0.11, -0.02])  # float32 of numbers of two decimals


@pytest.mark.usefixtures("folder")
def test_the_algorithm() -> None:
    """It trains, and its bound holds."""
    with tiny.one_rank():
        game = players("my_algorithm.py", total_episodes=8, bound=0.1)
        credit = game.algorithm.credit(game.score(game.sample(twice_each())))
        (metrics,) = on_course(game)
    assert credit.advantages.abs().max() <= torch.tensor(0.1) and game.critic is not None
    assert {"policy_loss", "value_loss"} <= metrics.keys() and metrics["optimizer_steps"] == 4


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ours = {"print-config", "config", "help", "help-all", "sft", "ppo"}
    options = ours | {name.split(".")[-1] for name in option_names(train.chain_config([]))}
    for option in re.findall(r"`--([\w.-]*\w)", text):
        assert option.split(".")[-1].replace("_", "-") in options, option
    for file in re.findall(
        r"(?<![\w/])(?:configs|rlhf|data|step\d_\w+|docs|tests)/[\w/.-]*\w(?:\.yaml|\.py|\.md)", text
    ):
        assert (ROOT / file).exists() or "NAME" in file, file
