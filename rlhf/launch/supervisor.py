"""Groups of processes that end together, and the rules by which they end. Torch-free."""

import abc
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, Self

import psutil

LAUNCHER = "RLHF_LAUNCHER_PID"
"""environment variable with the process id of the launcher, for the ranks that it starts"""
GRACE_S = 30.0
"""seconds from a signal to the kill"""
CLOSING_S = 5.0
"""seconds from the first failure of a rank to the kill of the others"""
POLL_S = 0.05
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REQUEUE, TERMINATED, HUNG_UP = ORDERLY = (75, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""exit codes of a rank that has saved after a signal: SIGUSR1 (a scheduler should start it again), SIGTERM, and SIGHUP
from a terminal, without a launcher"""
USER_ERROR, NON_FINITE = EXPLAINED = (2, 3)
"""exit codes of a user's mistake and of a non-finite number; the process has explained them"""


class ExitStatus(int):
    """The exit code of a group of ranks; below 0 it is a signal.

    cause: which ranks failed, how, and which did not answer
    crashed: no signal asked for the end, no rank saved or explained it, and no host was lost
    """

    cause: str
    crashed: bool

    def __new__(cls, code: int, cause: str = "", crashed: bool = False) -> Self:
        status = super().__new__(cls, code)
        status.cause, status.crashed = cause, crashed
        return status


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank ended.

    code: exit code, below 0 a signal
    state: what it did when it was killed, in psutil's words; empty if it was not killed
    lost: why the code is unknown
    """

    rank: int
    code: int
    host: str = ""
    state: str = ""
    lost: str = ""

    def __str__(self) -> str:
        name = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        return f"{name}: {self.lost or name_of(self.code)}"


def name_of(code: int) -> str:
    """`exit code 1`, or `SIGKILL` of -9."""
    if code >= 0:
        return f"exit code {code}"
    often = " (often: the machine is out of memory)" if code == -signal.SIGKILL else ""
    return signal.Signals(-code).name + often


class Group(Protocol):
    """Ranks on any hosts. `poll` returns each end once; until then the rank counts as running."""

    def running(self) -> list[int]: ...

    def poll(self) -> list[RankExit]: ...

    def signal(self, number: int) -> None: ...


class Ranks:
    """Processes of this machine, each in its own session; at the end of the block all are killed."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._reported: set[int] = set()
        self._states: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL, list(self._children))  # their child processes are in their groups
        for child in self._children.values():
            child.wait()

    def start(
        self, rank: int, command: list[str], environment: dict[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **streams)
        self._children[rank] = child
        return child

    def running(self) -> list[int]:
        return [rank for rank in self._children if rank not in self._reported]

    def poll(self) -> list[RankExit]:
        exits = []
        for rank in self.running():
            code = self._children[rank].poll()
            if code is not None:
                self._reported.add(rank)
                exits.append(RankExit(rank, code, state=self._states.get(rank, "")))
        return exits

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
    """What a process does, in psutil's words."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "unknown"


class SignalHandler(abc.ABC):
    """While it is open, `remember` receives the signals that end a run. A signal that was ignored stays ignored, such
    as SIGHUP under nohup."""

    def __enter__(self) -> Self:
        handled = [number for number in (*ENDING, signal.SIGUSR1) if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self.remember) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @abc.abstractmethod
    def remember(self, number: int, _: FrameType | None = None) -> None:
        """Called at any point of the program."""


class Signals(SignalHandler):
    """Signals to this process, stored until `take`. One that nobody has taken is raised again at the end."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def remember(self, number: int, _: FrameType | None = None) -> None:
        self._waiting.append(number)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for number in self.take():
            signal.raise_signal(number)

    def waiting(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[int]:
        numbers, self._waiting = self._waiting, []
        return numbers


class GroupWatch:
    """Waits for the end of a group.

    SIGTERM, SIGINT and SIGHUP reach every rank as SIGTERM, and SIGKILL follows with a second signal; or after
    `grace_s`, but not while `unsaved` says that finished steps are in no checkpoint. SIGUSR1 is passed on, with no
    deadline. When a rank fails the others get SIGTERM, and SIGKILL after CLOSING_S; or after `grace_s` if the rank had
    saved, because then all ranks have saved.
    """

    def __init__(
        self, group: Group, signals: Signals, grace_s: float, unsaved: Callable[[], bool] = lambda: False
    ) -> None:
        self._group, self._signals, self._grace_s, self._unsaved = group, signals, grace_s, unsaved
        self._deadline = float("inf")
        self._was_unsaved = False
        self._first: RankExit | None = None
        self._killed: list[RankExit] = []
        self._stops: list[int] = []
        self._requeue = self._overdue = self._lost = False

    def wait(self) -> ExitStatus:
        self._handle_signals()
        while self._group.running():
            for end in self._group.poll():
                self._record(end)
            self._handle_signals()
            now = time.monotonic()
            if now > self._deadline and self._saves():
                self._deadline = now + self._grace_s
            elif now > self._deadline:
                self._overdue, self._deadline = True, now + CLOSING_S
                self._group.signal(signal.SIGKILL)
            time.sleep(POLL_S)
        self._handle_signals()
        code = self._code()
        requested = self._stops or self._requeue
        return ExitStatus(code, self._cause(), not (requested or self._lost or code in (0, *EXPLAINED, *ORDERLY)))

    def _handle_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGUSR1:
                self._requeue = True
                self._group.signal(number)
                continue
            self._stops.append(number)
            self._was_unsaved = self._unsaved()
            self._kill_within(self._grace_s)
            self._group.signal(signal.SIGTERM if len(self._stops) == 1 else signal.SIGKILL)

    def _record(self, end: RankExit) -> None:
        self._lost = self._lost or bool(end.lost)
        if end.state or (end.lost and self._first):
            self._killed.append(end)
        if end.code == 0 or self._first is not None:
            return
        self._first = end
        in_order = end.code in ORDERLY or (self._requeue and end.code == -signal.SIGUSR1)
        if in_order or not self._stops:
            self._kill_within(self._grace_s if in_order else CLOSING_S)
            self._group.signal(signal.SIGTERM)

    def _saves(self) -> bool:
        """Whether the ranks, asked once to end, have yet to save, or may just have saved and not ended."""
        before, self._was_unsaved = self._was_unsaved, self._unsaved()
        fine = self._first is None or self._first.code in ORDERLY
        return len(self._stops) == 1 and fine and (before or self._was_unsaved)

    def _kill_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _code(self) -> int:
        first = 0 if self._first is None else self._first.code
        if self._stops:
            in_order = first in (0, REQUEUE, TERMINATED, -signal.SIGTERM, -self._stops[0])
            if len(self._stops) > 1 or (in_order and not self._overdue):
                return -self._stops[0]
            return -signal.SIGKILL if in_order else first
        if self._requeue and first in (0, -signal.SIGUSR1):
            return REQUEUE  # before the first step, or after the last
        return first

    def _cause(self) -> str:
        causes = []
        if self._stops:
            causes.append(signal.Signals(self._stops[0]).name + (", then another" if len(self._stops) > 1 else ""))
        elif self._first is None or self._first.code in (REQUEUE, TERMINATED, -signal.SIGUSR1):
            to_requeue = self._requeue or (self._first is not None and self._first.code == REQUEUE)
            causes += ["SIGUSR1"] if to_requeue else ["SIGTERM"] if self._first else []
        if self._first is not None and self._first.code not in (REQUEUE, TERMINATED, -signal.SIGUSR1):
            killed_by_us = self._first in self._killed or (self._stops and self._first.code == -signal.SIGTERM)
            causes += [] if killed_by_us else [str(self._first)]
        if self._overdue:
            causes += [_describe_killed(end) for end in self._killed]
        return "; ".join(causes)


def _describe_killed(end: RankExit) -> str:
    name = f"rank {end.rank}" + (f" on {end.host}" if end.host else "")
    reason = {psutil.STATUS_STOPPED: "it is stopped", psutil.STATUS_DISK_SLEEP: "it waits for a disk or a device"}.get(
        end.state, end.lost or "stopped or hung"
    )
    return f"{name} did not answer: {reason}"
