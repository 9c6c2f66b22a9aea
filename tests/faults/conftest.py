"""The uninterrupted runs that others must equal, and how long each test took."""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.faults import harness


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> harness.Whole:
    """`whole(processes, step)`: the directory of a chain that nothing interrupted, finished up to that step."""
    folder = tmp_path_factory.mktemp("whole")

    @cache
    def of(processes: int, step: int) -> Path:
        out = folder / f"of-{processes}"
        if step > 1:
            of(processes, step - 1)
        harness.run(out, harness.chain(out, "--steps", str(step), processes=processes)).require(0)
        return out

    return of


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test that passed, into the file that RLHF_FAULTS_REPORT names; tests.faults.table reads it."""
    report_path = os.environ.get("RLHF_FAULTS_REPORT")
    if report_path and report.when == "call" and report.passed:
        line = json.dumps({"test": report.nodeid, "seconds": round(report.duration, 1), **dict(report.user_properties)})
        with Path(report_path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
