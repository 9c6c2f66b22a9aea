"""docs/reliability.md: its table is that of the tests, and its commands and options are there."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from rlhf.chain import command as train
from rlhf.config import option_names
from tests.docs.test_fault_table import ROWS_A, ROWS_B, ROWS_C
from tests.faults import table

PAGE = table.PAGE.read_text(encoding="utf-8")


def test_every_fault_has_its_row_and_its_tests() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    for number, tests in {**ROWS_A, **ROWS_B, **ROWS_C}.items():
        assert set(re.findall(r"`([\w/]+\.py::\w+)`", rows[str(number)])) == set(tests), number


def test_the_table_is_put_in_the_place_of_the_old(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    lines = [("tests/faults/test_kills.py::test_x[1-2]", 3), ("tests/faults/test_kills.py::test_x[2]", 4.5)]
    report.write_text("".join(f'{{"test": "{test}", "seconds": {seconds}}}\n' for test, seconds in lines))
    assert table.seconds_in(report) == {"faults/test_kills.py::test_x": 7.5}
    again = table.put(PAGE, table.table({}))
    assert table.put(again, table.table({})) == again and again.count(table.HEAD) == 1
    assert again.startswith(PAGE[: PAGE.index(table.HEAD)])


def test_its_commands_are_accepted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [command] = re.findall(r"```bash\n(python train.py .*)\n```", PAGE)
    monkeypatch.chdir(table.PAGE.parents[1])
    monkeypatch.setattr(sys, "argv", [*shlex.split(command)[1:], "--print-config"])
    train.main()
    assert yaml.safe_load(capsys.readouterr().out)["save_every"] == 20


def test_its_options_are_there() -> None:
    known = set(option_names(train.chain_config([])))
    for name in set(re.findall(r"`--([a-z.-]+)", PAGE)):
        if name != "signal":  # of sbatch
            assert name in known or any(option.endswith(f".{name}") for option in known), name
