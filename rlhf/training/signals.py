"""Signals that ask a run to end: remembered, heard by every rank at the end of a step, obeyed after a checkpoint."""

import contextlib
import os
import signal
import sys
from types import FrameType

from rlhf.distributed import collectives
from rlhf.launch.supervisor import HUNG_UP, LAUNCHER, REQUEUE, TERMINATED, SignalHandler

CODES = {
    signal.SIGUSR1: REQUEUE,
    signal.SIGTERM: TERMINATED,
    signal.SIGINT: TERMINATED,
    signal.SIGHUP: HUNG_UP,
}
"""exit codes by what asked; schedulers send SIGUSR1 before a time limit"""


class Ending(SignalHandler):
    """While it is open, the first signal is only remembered. A second ends a process without a launcher at once; a
    launcher kills its processes itself, and may pass on one signal that others have sent to each process already."""

    SAID = b"\nasked to end: this step, then a checkpoint; asked once more, at once\n"

    def __init__(self) -> None:
        self._asked = 0

    def remember(self, number: int, _: FrameType | None = None) -> None:
        again = self._asked not in (0, signal.SIGUSR1) and number not in (signal.SIGUSR1, signal.SIGHUP)
        if again and LAUNCHER not in os.environ:
            os._exit(TERMINATED)
        if self._asked:  # a scheduler's SIGTERM after its SIGUSR1 asks for nothing new; SIGHUP often comes twice
            return
        self._asked = number
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # nobody reads it, or the disk behind it is full
                os.write(sys.stderr.fileno(), self.SAID)

    def heard(self, due: bool) -> tuple[signal.Signals | None, bool]:
        """What any rank was asked, and whether on any rank a checkpoint is `due`. Every rank calls this together."""
        asked, due_somewhere = collectives.max_over_ranks([self._asked, due])
        return (signal.Signals(int(asked)) if asked else None), bool(due_somewhere)
