"""What a process with limits does, and what is told of it."""

import os
import signal
import time

import pytest

from rlhf.errors import UserError
from rlhf.hub import limits


def mistake() -> None:
    raise UserError("line 3: no text")


def test_what_a_limited_job_does_is_lost_and_what_it_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ.copy()
    limits.run_limited(lambda: os.environ.clear(), "the job", 1)
    assert os.environ == before
    with pytest.raises(UserError, match=r"^line 3: no text$"):
        limits.run_limited(mistake, "the job", 1)
    with pytest.raises(RuntimeError, match=r"(?s)the job: .*ZeroDivisionError"):
        limits.run_limited(lambda: 1 // 0, "the job", 1)
    with pytest.raises(UserError, match="the job: got a lack of memory, expected at most 1 seconds and 1024 MiB"):
        limits.run_limited(lambda: bytes(2 << 30), "the job", 1)
    monkeypatch.setattr(limits, "WALL_S", 0.2)
    with pytest.raises(UserError, match="the job: got work without an end"):
        limits.run_limited(lambda: time.sleep(60), "the job", 1)


def test_ctrl_c_in_a_fork_is_not_lost() -> None:
    after = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), limits.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            after.append("the block's end")
    finally:
        signal.signal(signal.SIGINT, before)
    assert after
