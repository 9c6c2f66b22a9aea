"""Signals while a loop runs, and what Ctrl-C shows on a real terminal."""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from rlhf import console
from rlhf.launch.supervisor import LAUNCHER
from rlhf.training import signals
from rlhf.training.signals import CODES, Ending
from tests.support import forked


def test_a_terminal_that_is_gone_asks_to_end_as_sigterm_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Ending() as ending:
            for _ in range(2):  # from the kernel and from the shell
                os.kill(os.getpid(), signal.SIGHUP)
            assert ending.across_ranks(due=False) == (signal.SIGHUP, False)
        assert CODES[signal.SIGHUP] == 129 and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with Ending() as ending:
            os.kill(os.getpid(), signal.SIGHUP)
            assert ending.across_ranks(due=False) == (None, False)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("launcher", "code"), [({}, 143), ({LAUNCHER: "1"}, 7)])
def test_a_second_sigterm_ends_only_a_process_without_a_launcher(
    launcher: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deepspeed and SLURM signal a rank and its launcher, which passes the signal on."""
    program = (
        "import os\nfrom rlhf.training.signals import Ending\n"
        "with Ending() as ending:\n    for _ in range(2): os.kill(os.getpid(), 15)\nos._exit(7)"
    )
    monkeypatch.delenv(LAUNCHER, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    done = forked.python("-c", program)
    assert done.returncode == code and done.stderr.count(Ending.MESSAGE.decode()) == 1


def test_the_first_signal_says_how_long_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 150.0, 162.0])  # at the start, at the end of the first step, at the signal
    said: list[bytes] = []
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(os, "write", lambda _, text: said.append(text))
    ending = Ending()
    ending.across_ranks(due=False)
    ending.remember(signal.SIGTERM)
    assert said == [Ending.MESSAGE + b"the last step took 50 s, this one has taken 12 s\n"]


def test_ctrl_c_has_lines_of_its_own_beside_the_bar() -> None:
    """A pseudo-terminal, which echoes ^C behind the bar, and sends SIGINT to the process in front."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
        sys.stderr = os.fdopen(2, "w")  # pytest has put another one in its place
        with Ending() as ending, console.bar("step", 100) as bar:
            while not ending._signal:
                time.sleep(0.01)
                bar.advance(0)
            bar.advance(1)
        os.write(2, b"after the bar\n")
        os._exit(0)
    shown, interrupted = b"", False
    while b"after the bar" not in shown:
        piece = os.read(terminal, 4096)
        shown += piece
        if b"0/100" in shown and not interrupted:
            interrupted = bool(os.write(terminal, b"\x03"))
    assert os.waitpid(child, 0)[1] == 0
    lines = re.split("[\r\n]+", shown.decode())
    where = lines.index(Ending.MESSAGE.decode().strip())
    assert lines[where - 1].endswith("]^C") and "1/100" in lines[where + 1] and lines[-2:] == ["after the bar", ""]
