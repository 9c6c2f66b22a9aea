"""docs/reliability.md: the tests of its table, its commands and its options are there."""

import importlib
import importlib.util
import operator
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from rlhf.chain import command as train
from rlhf.config import option_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")


def test_every_fault_has_tests_and_they_are_there() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    assert {*map(int, rows)} > {*range(1, 43)}  # 43 to 95 are of data, models and numbers
    for number, row in rows.items():
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert tests, number
        for file, test in tests:
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{number}: {file}::{test}"


def test_the_points_at_which_faults_happen_exist() -> None:
    """`make test` notices a renamed function, which `make test-faults` would need minutes to find."""
    site = ROOT / "tests/faults/site/sitecustomize.py"
    spec = importlib.util.spec_from_file_location("faults_on_demand", site)
    assert spec is not None and spec.loader is not None
    faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    for module, path, _ in faults.POINTS.values():
        assert callable(operator.attrgetter(path)(importlib.import_module(module))), path


def test_its_commands_are_accepted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [command] = re.findall(r"```bash\n(python train.py .*)\n```", PAGE)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*shlex.split(command)[1:], "--print-config"])
    train.main()
    assert yaml.safe_load(capsys.readouterr().out)["save_every"] == 20


def test_its_options_are_there() -> None:
    known = set(option_names(train.chain_config([])))
    for name in set(re.findall(r"`--([a-z.-]+)", PAGE)):
        if name != "signal":  # of sbatch
            assert name in known or any(option.endswith(f".{name}") for option in known), name
