"""Signals: a checkpoint at the present step, the exit code that says so, and a run that goes on to the same end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import harness
from tests.support.processes import alive, until

pytestmark = pytest.mark.faults
TERMINATED, INTERRUPTED = 143, 130


def require_saved(ended: harness.Ended, step: int, code: int, name: str) -> None:
    """The newest checkpoint is of the last step that was done."""
    ended.require(code)
    done = harness.last_step(ended.out, step)
    assert harness.saved_steps(ended.out, step)[-1] == done
    assert name in ended.last_line and f"after step {done}" in ended.last_line


def test_sigterm_in_the_middle_of_generation_waits_for_the_iteration(
    whole: harness.Whole, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    out = harness.after_stages(whole(1, 2), tmp_path / "out", 3)
    long = ["--ppo.response-length", "60", "--ppo.max-length", "100", "--ppo.batch-size", "256"]
    long += ["--ppo.total-episodes", "1024", "--ppo.rollout-batch-size", "256"]
    fault = "generate:0:3:parent-sigterm"  # twice responses are sampled before training
    ended = harness.run(out, harness.chain(out, "--steps", "3", *long), fault)
    require_saved(ended, 3, TERMINATED, "SIGTERM")
    [first] = [row for row in harness.rows(out, 3) if row["kind"] == "train"]
    record_property("seconds_to_the_end", ended.after)
    record_property("seconds_of_the_iteration", first["seconds_iteration"])
    assert ended.after < first["seconds_iteration"] + harness.PROMPT_S


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, TERMINATED), (signal.SIGINT, INTERRUPTED)])
def test_a_second_signal_ends_it_at_once(number: int, code: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = harness.chain(out, "--steps", "1", processes=2)
    with harness.running(out, command, "step:1:4:sleep:300") as run:
        run.reached()
        run.signal(number)
        time.sleep(1)
        assert run.process.poll() is None  # it waits for the step
        start = time.monotonic()
        run.signal(number)
        ended = run.wait().require(code, signal.Signals(number).name)
        assert time.monotonic() - start < harness.PROMPT_S
    assert harness.saved_steps(out, 1) == [2] and "after step 2" in ended.last_line


def test_ctrl_c_once_is_a_signal_as_any(whole: harness.Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with harness.running(out, harness.chain(out, "--steps", "1"), "step:0:3:sleep:2") as run:
        run.reached()
        run.signal(signal.SIGINT)
        ended = run.wait()
    require_saved(ended, 1, INTERRUPTED, "SIGINT")
    harness.run(out, harness.printed_command(ended)).require(0, "resumes after step 3")
    harness.assert_same(out, whole(1, 1), 1)


@pytest.mark.parametrize(("number", "to_all", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, -15)])
def test_a_chain_that_tokenises_ends_whole(number: int, to_all: bool, code: int, tmp_path: Path) -> None:
    """The chain tokenises for its checks, in two processes of its own, before any stage begins."""
    command = [sys.executable, "train.py", "--config", "configs/demo.yaml", "--data-path", "demo,rows=60000"]
    command += ["--data-workers", "2", "--data-cache", str(tmp_path / "cache"), "--output-dir", str(tmp_path / "out")]
    started = subprocess.Popen(command, cwd=harness.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    start = time.monotonic()
    try:
        until(lambda: len(alive(str(tmp_path))) == 3, harness.LIMIT_S)
        slow = time.monotonic() - start
        (os.killpg if to_all else os.kill)(started.pid, number)
        _, stderr = started.communicate(timeout=max(harness.PROMPT_S, slow))  # on any machine the end is no slower
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == code and "Traceback" not in stderr
    assert stderr.endswith("interrupted\n") == (number == signal.SIGINT)
    until(lambda: not alive(str(tmp_path)), harness.GONE_S)
