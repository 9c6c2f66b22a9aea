"""benchmarks/memory.py and trunk.py: what they refuse before anything is measured, and how they end."""

import subprocess
import sys

import pytest

from benchmarks import memory, trunk
from benchmarks.harness import ROOT


@pytest.mark.parametrize(("module", "option"), [("memory", "--stages"), ("trunk", "--contenders")])
def test_what_cannot_be_measured_is_refused_in_one_line(module: str, option: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{module}", option, "step3_ppo"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr


def test_defaults() -> None:
    assert trunk.Options().contenders == ("full", "trunk", "one")
    assert "stages" not in memory.Options.model_fields
