"""Of each kind of fault the one that matters most, in one stage and one process: the quickest check of them all."""

import os
import socket
from pathlib import Path

import pytest

from rlhf.storage import manifests
from tests.faults import harness

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    harness.run(out, harness.chain(out, "--steps", "1")).require(0, "8 of 8")
    return out


def test_killed_and_asked_to_end_and_it_is_the_same(whole: Path, tmp_path: Path) -> None:
    """SIGKILL in step 4, SIGTERM to the launcher in step 6, the rest: each time by the command that the last lines
    name, and never a process is left."""
    out = tmp_path / "out"
    killed = harness.run(out, harness.chain(out, "--steps", "1"), "step:0:4:kill9")
    assert killed.code == 137 and killed.after < harness.PROMPT_S
    for word in ("step1_sft did not finish", "at step 3", "rank 0: SIGKILL", "after step 2"):
        assert word in killed.last_line
    terminated = harness.run(out, harness.printed_command(killed), "step:0:4:parent-sigterm")
    terminated.require(143, "resumes after step 2")
    assert "SIGTERM" in terminated.last_line and harness.saved_steps(out, 1)[-1] == harness.last_step(out, 1) == 6
    harness.run(out, harness.printed_command(terminated)).require(0, "resumes after step 6")
    harness.assert_same(out, whole, 1)


def test_a_directory_in_use_is_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "step1_sft").mkdir(parents=True)
    with manifests.locked(tmp_path / "out" / "step1_sft"):
        refused = harness.run(tmp_path / "out", harness.alone(tmp_path / "out", whole, 1))
    refused.require(2, f"in use by process {os.getpid()} on {socket.gethostname()}", "--output-dir")
    assert not harness.files(tmp_path / "out" / "step1_sft")
