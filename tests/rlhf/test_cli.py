"""`rlhf VERB`: the usage, every verb's help, and the lines of what is refused."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from rlhf import cli
from rlhf.config import yaml_files
from rlhf.errors import UserError
from tests.support import programs
from tests.support.programs import Run


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return programs.runner("rlhf", cli.main, monkeypatch, capsys)


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_the_usage_names_every_verb(words: tuple[str, ...], rlhf: Run) -> None:
    code, out, err = rlhf(*words)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(cli.VERBS)


def test_the_version_is_that_of_the_package(rlhf: Run) -> None:
    project = tomllib.loads((cli.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert rlhf("--version") == (0, f"rlhf-pipeline {project['version']}\n", "")
    assert project["name"] == cli.DISTRIBUTION


@pytest.mark.parametrize(
    ("verb", "option"),
    {
        "train": "--ppo.kl-coef", "plan": "--ppo.kl-coef", "sft": "--loss-on", "reward": "--model", "ppo": "--kl-coef",
        "preview": "--phases", "report": "--output", "evaluate": "--prompts", "evaluate-reward": "--max-rows",
        "pairs": "--prompts", "verify": "output directory of a run", "diff": "output directories of two",
        "chat": "--compare", "export": "--merge",
    }.items(),
)  # fmt: skip
def test_the_help_of_a_verb_names_its_options(verb: str, option: str, rlhf: Run) -> None:
    code, out, err = rlhf(verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: rlhf {verb} ") and option in out


def test_another_package_of_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of data files is none; one with code is."""
    monkeypatch.delitem(sys.modules, "data")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "data").mkdir()
    cli.require_own_packages()
    (tmp_path / "data/__init__.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="package data: Python would import it from") as refused:
        cli.require_own_packages()
    assert f"from {tmp_path}/data/__init__.py, expected {cli.ROOT}/data/__init__.py; " in str(refused.value)


def test_an_option_of_the_user_that_names_a_shipped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path under configs/ is the shipped file in any directory, unless there is one."""
    monkeypatch.chdir(tmp_path)
    lora = "configs/overlays/lora.yaml"
    assert yaml_files.read_yaml(lora) == yaml_files.read_yaml(cli.ROOT / lora)
    (tmp_path / lora).parent.mkdir(parents=True)
    (tmp_path / lora).write_text("seed: 3")
    assert yaml_files.read_yaml(lora) == {"seed": 3}
