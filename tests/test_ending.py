"""Signals while a loop runs."""

import os
import signal

from rlhf.ending import CODES, Ending


def test_a_terminal_that_is_gone_asks_to_end_as_sigterm_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Ending() as ending:
            for _ in range(2):  # from the kernel and from the shell
                os.kill(os.getpid(), signal.SIGHUP)
            assert ending.heard(due=False) == (signal.SIGHUP, False)
        assert CODES[signal.SIGHUP] == 129 and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with Ending() as ending:
            os.kill(os.getpid(), signal.SIGHUP)
            assert ending.heard(due=False) == (None, False)
    finally:
        signal.signal(signal.SIGHUP, before)
