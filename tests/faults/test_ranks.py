"""One rank of two fails, hangs or runs out of memory: the job ends soon, and says which and why."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.faults import harness

pytestmark = pytest.mark.faults


def test_a_stopped_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1", "--timeout-s", "5", processes=2)
    ended = harness.run(out, command, "step:1:4:sigstop")
    assert ended.code not in (0, 2, 3, 75, 143)
    assert ended.after < 60
    for word in ("rank 1 did not answer: it is stopped", "step1_sft did not finish", "at step 3", "after step 2"):
        assert word in ended.last_line


def test_an_exception_on_one_rank_is_what_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = harness.run(out, harness.chain(out, "--steps", "1", processes=2), "step:1:4:raise")
    ended.require(1, "ArithmeticError: this was done on purpose")
    assert ended.after < harness.PROMPT_S
    assert "rank 1: exit code 1" in ended.last_line and "after step 2" in ended.last_line
    assert ended.output.count("Traceback") == 1


def test_out_of_memory_says_what_helps(whole: harness.Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1", processes=2)
    ended = harness.run(out, command, "forward:1:4:oom")
    ended.require(1)
    assert ended.after < harness.PROMPT_S and "Traceback" not in ended.output
    [line] = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    for word in ("rank 1", "Tried to allocate 2.00 GiB", "--micro-batch-size", "--zero-stage"):
        assert word in line
    assert "after step 2" in ended.last_line
    harness.run(out, harness.printed_command(ended)).require(0, "resumes after step 2")
    harness.assert_same(out, whole(2, 1), 1)


@pytest.mark.parametrize("action", ["raise", "kill9"])
def test_a_stage_that_crashes_ends_the_chain(action: str, whole: harness.Whole, tmp_path: Path) -> None:
    out = harness.after_stages(whole(1, 1), tmp_path / "out", 2)
    ended = harness.run(out, harness.chain(out), f"step2_reward/step:0:4:{action}")
    ended.require(1 if action == "raise" else 137, "step1_sft: already complete")
    assert "step2_reward did not finish" in ended.last_line and "at step 3" in ended.last_line
    assert not (out / "step3_ppo").exists() and not (out / "step2_reward" / "manifest.json").exists()


def test_a_second_run_in_one_directory_is_refused(whole: harness.Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1")
    with harness.running(out, command, "step:0:4:sleep:3000") as first:
        first.reached()
        [holder] = harness.processes(first.id).keys() - {first.process.pid}  # a fork: it has the same command line
        before = {path: path.stat().st_mtime_ns for path in (out / "step1_sft").rglob("*")}
        alone = (harness.alone(out, whole(1, 1), 1), f"{out}/step1_sft: in use by process {holder}")
        for second, message in ((command, f"{out}: in use by process "), alone):
            refused = harness.run(out, second)
            refused.require(2, message, f" on {socket.gethostname()}")
            assert refused.last_line.startswith("error: ")
        assert before == {path: path.stat().st_mtime_ns for path in (out / "step1_sft").rglob("*")}
        os.kill(holder, signal.SIGKILL)
        first.wait().require(137, "rank 0: SIGKILL")
    harness.run(out, command).require(0, "resumes after step 2")
    harness.assert_same(out, whole(1, 1), 1)
