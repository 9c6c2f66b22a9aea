"""Signals that ask a run to end: remembered, heard by every rank at the end of a step, obeyed after a checkpoint."""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Self

from rlhf.distributed import collectives
from rlhf.launch.supervisor import HUNG_UP, REQUEUE, TERMINATED

CODES = {
    signal.SIGUSR1: REQUEUE,
    signal.SIGTERM: TERMINATED,
    signal.SIGINT: TERMINATED,
    signal.SIGHUP: HUNG_UP,
}
"""exit codes by what asked; schedulers send SIGUSR1 before a time limit"""


class Ending:
    """While it is open, the first signal is only remembered; a second ends the process at once.

    A handler does nothing else: it may run in the middle of anything.
    """

    SAID = b"\nasked to end: this step, then a checkpoint; asked once more, at once\n"

    def __init__(self) -> None:
        self._asked = 0

    def __enter__(self) -> Self:
        heard = [number for number in CODES if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        self._before = {number: signal.signal(number, self._remember) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self._asked not in (0, signal.SIGUSR1) and number not in (signal.SIGUSR1, signal.SIGHUP):
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
