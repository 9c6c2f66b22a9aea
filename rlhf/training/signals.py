"""Signals that ask a run to end: stored, shared by all ranks at the end of a step, obeyed after a checkpoint."""

import contextlib
import os
import signal
import sys
import time
from types import FrameType

from rlhf.distributed import collectives
from rlhf.launch.supervisor import HUNG_UP, LAUNCHER, REQUEUE, TERMINATED, SignalHandler

CODES = {
    signal.SIGUSR1: REQUEUE,
    signal.SIGTERM: TERMINATED,
    signal.SIGINT: TERMINATED,
    signal.SIGHUP: HUNG_UP,
}
"""exit codes by signal; schedulers send SIGUSR1 before a time limit"""


class Ending(SignalHandler):
    """While it is open, the first signal is stored, and the user learns how long a step takes. A second signal ends a
    process without a launcher at once; a launcher kills its processes itself, and may pass on a signal that each
    process has already received."""

    MESSAGE = b"\nending after this step and a checkpoint; a second signal ends the run at once\n"

    def __init__(self) -> None:
        self._signal = 0
        self._step_began, self._last_step_s = time.monotonic(), 0.0

    def remember(self, number: int, _: FrameType | None = None) -> None:
        repeated = self._signal not in (0, signal.SIGUSR1) and number not in (signal.SIGUSR1, signal.SIGHUP)
        if repeated and LAUNCHER not in os.environ:
            os._exit(TERMINATED)
        if self._signal:  # a scheduler sends SIGTERM after SIGUSR1, and SIGHUP often comes twice
            return
        self._signal = number
        if os.environ.get("RANK", "0") == "0":
            now = time.monotonic() - self._step_began
            times = f"the last step took {self._last_step_s:.0f} s, this one has taken {now:.0f} s\n"
            with contextlib.suppress(OSError):  # stderr is closed, or its disk is full
                os.write(sys.stderr.fileno(), self.MESSAGE + (times.encode() if self._last_step_s >= 1 else b""))

    def across_ranks(self, due: bool) -> tuple[signal.Signals | None, bool]:
        """The signal that any rank has received, and whether a checkpoint is due on any rank. All ranks call it
        together."""
        now = time.monotonic()
        self._step_began, self._last_step_s = now, now - self._step_began
        number, any_due = collectives.max_over_ranks([self._signal, due])
        return (signal.Signals(int(number)) if number else None), bool(any_due)
