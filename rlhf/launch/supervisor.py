"""Processes that end together: those of this machine, and the rule by which a group of them ends. Torch-free."""

import abc
import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

LAUNCHER = "RLHF_LAUNCHER_PID"
"""variable in which a rank that we start finds our process id"""
GRACE_S = 30.0
"""from a signal to the kill"""
CLOSING_S = 5.0
"""from the first failure of a rank to the kill of the others"""
POLL_S = 0.05
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REQUEUE, TERMINATED, HUNG_UP = IN_ORDER = (75, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""exit codes of a rank that was asked to end and has saved: by SIGUSR1, which means `start me again`, by SIGTERM, and,
where no launcher stands between it and the terminal, by SIGHUP"""
MISTAKE, NON_FINITE = SAID = (2, 3)
"""exit codes of a user's mistake and of a number that is not finite; the process has said what it was"""


class Ended(int):
    """The exit code of a group of ranks, below 0 that of a signal, and `cause`: who failed, how, and who did not
    answer. `crashed`: nobody asked for it, no rank ended in order or has told the user why, and every host is there."""

    cause: str
    crashed: bool

    def __new__(cls, code: int, cause: str = "", crashed: bool = False) -> Self:
        ended = super().__new__(cls, code)
        ended.cause, ended.crashed = cause, crashed
        return ended


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended. `code` is below 0 for a signal; `state` is the kernel's letter for what it was doing when it
    had to be killed; `lost` says why nothing is known of it."""

    rank: int
    code: int
    host: str = ""
    state: str = ""
    lost: str = ""

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        return f"{where}: {self.lost or name_of(self.code)}"


def name_of(code: int) -> str:
    """`exit code 1`, or `SIGKILL` of -9."""
    if code >= 0:
        return f"exit code {code}"
    often = " (often: the machine is out of memory)" if code == -signal.SIGKILL else ""
    return signal.Signals(-code).name + often


class Group(Protocol):
    """Ranks wherever they are. Each end is told once; until then the rank is among those running."""

    def running(self) -> list[int]: ...

    def poll(self) -> list[RankEnd]: ...

    def signal(self, number: int) -> None: ...


class Ranks:
    """Processes of this machine, each in a session of its own; at the end of the block none is left."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._told: set[int] = set()
        self._states: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL, list(self._children))  # what they left running is in their groups
        for child in self._children.values():
            child.wait()

    def start(
        self, rank: int, command: list[str], environment: dict[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **streams)
        self._children[rank] = child
        return child

    def running(self) -> list[int]:
        return [rank for rank in self._children if rank not in self._told]

    def poll(self) -> list[RankEnd]:
        ended = []
        for rank in self.running():
            code = self._children[rank].poll()
            if code is not None:
                self._told.add(rank)
                ended.append(RankEnd(rank, code, state=self._states.get(rank, "")))
        return ended

    def signal(self, number: int) -> None:
        alive = [rank for rank in self.running() if self._children[rank].poll() is None]
        if number == signal.SIGKILL:
            for rank in alive:
                self._states.setdefault(rank, _state(self._children[rank].pid))
        self._send(number, alive)

    def _send(self, number: int, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._children[rank].pid, number)


def _state(pid: int) -> str:
    """The kernel's letter: R runs, S and D wait, T is stopped. `?` where /proc does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


class SignalHandler(abc.ABC):
    """While it is open, `remember` gets the signals that ask a run to end; those that were ignored stay so, as SIGHUP
    under nohup."""

    def __enter__(self) -> Self:
        handled = [number for number in (*ENDING, signal.SIGUSR1) if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self.remember) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @abc.abstractmethod
    def remember(self, number: int, _: FrameType | None = None) -> None:
        """It may run in the middle of anything."""


class Signals(SignalHandler):
    """Signals to this process, remembered until someone takes them."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def remember(self, number: int, _: FrameType | None = None) -> None:
        self._waiting.append(number)

    def waiting(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[int]:
        taken, self._waiting = self._waiting, []
        return taken


class Watch:
    """Follows a group to its end.

    SIGTERM, SIGINT and SIGHUP reach every rank as SIGTERM, and SIGKILL follows after `grace_s`, or with a second
    signal. SIGUSR1 is passed on, with no deadline. When a rank fails the others get SIGTERM, and SIGKILL after
    CLOSING_S; or after `grace_s`, if it ended in order: then all have saved, and nothing is left to do.
    """

    def __init__(self, group: Group, asked: Signals, grace_s: float) -> None:
        self._group, self._asked, self._grace_s = group, asked, grace_s
        self._deadline = float("inf")
        self._first: RankEnd | None = None
        self._killed: list[RankEnd] = []
        self._stops: list[int] = []
        self._requeue = self._overdue = self._lost = False

    def follow(self) -> Ended:
        self._obey()
        while self._group.running():
            for end in self._group.poll():
                self._note(end)
            self._obey()
            now = time.monotonic()
            if now > self._deadline:
                self._overdue, self._deadline = True, now + CLOSING_S
                self._group.signal(signal.SIGKILL)
            time.sleep(POLL_S)
        code = self._code()
        asked = self._stops or self._requeue
        return Ended(code, self._cause(), not (asked or self._lost or code in (0, *SAID, *IN_ORDER)))

    def _obey(self) -> None:
        for number in self._asked.take():
            if number == signal.SIGUSR1:
                self._requeue = True
                self._group.signal(number)
                continue
            self._stops.append(number)
            self._end_within(self._grace_s)
            self._group.signal(signal.SIGTERM if len(self._stops) == 1 else signal.SIGKILL)

    def _note(self, end: RankEnd) -> None:
        self._lost = self._lost or bool(end.lost)
        if end.state or (end.lost and self._first):
            self._killed.append(end)
        if end.code == 0 or self._first is not None:
            return
        self._first = end
        in_order = end.code in IN_ORDER or (self._requeue and end.code == -signal.SIGUSR1)
        if in_order or not self._stops:
            self._end_within(self._grace_s if in_order else CLOSING_S)
            self._group.signal(signal.SIGTERM)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _code(self) -> int:
        first = 0 if self._first is None else self._first.code
        if self._stops:
            in_order = first in (0, REQUEUE, TERMINATED, -signal.SIGTERM, -self._stops[0])
            if len(self._stops) > 1 or (in_order and not self._overdue):
                return -self._stops[0]
            return -signal.SIGKILL if in_order else first
        if self._requeue and first in (0, -signal.SIGUSR1):
            return REQUEUE  # it had not begun, or ended with nothing left to do
        return first

    def _cause(self) -> str:
        said = []
        if self._stops:
            said.append(signal.Signals(self._stops[0]).name + (", then another" if len(self._stops) > 1 else ""))
        elif self._first is None or self._first.code in (REQUEUE, TERMINATED, -signal.SIGUSR1):
            said += ["SIGUSR1"] if self._requeue else ["SIGTERM"] if self._first else []
        if self._first is not None and self._first.code not in (REQUEUE, TERMINATED, -signal.SIGUSR1):
            killed_by_us = self._first in self._killed or (self._stops and self._first.code == -signal.SIGTERM)
            said += [] if killed_by_us else [str(self._first)]
        if self._overdue:
            said += [_unanswered(end) for end in self._killed]
        return "; ".join(said)


def _unanswered(end: RankEnd) -> str:
    where = f"rank {end.rank}" + (f" on {end.host}" if end.host else "")
    why = {"T": "it is stopped", "D": "it waits for a disk or a device"}.get(end.state, end.lost or "stopped or hung")
    return f"{where} did not answer: {why}"
