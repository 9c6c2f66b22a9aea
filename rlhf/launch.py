"""Starting a stage: the launcher's side, which ends every process it began, and the side of the process begun.

Importing this module must not import torch, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import ctypes
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self, TypeVar

from rlhf import config
from rlhf.config import UserError
from rlhf.options import RunOptions

C = TypeVar("C", bound=RunOptions)

GRACE_S = 30.0
"""from a signal to the kill"""
CLOSING_S = 5.0
"""from the first failure of a rank to the kill of the others"""
PATIENCE_S = 5.0
"""a rank that has nothing of its own to say waits this long, to be ended by the launcher in silence"""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAUNCHER = "RLHF_LAUNCHER_PID"
MISTAKE, NON_FINITE = SAID = (2, 3)
"""exit codes of a user's mistake and of a number that is not finite; the process has said what it was"""


def run(module: str, argv: Sequence[str], processes: int = 1) -> int:
    """Run `processes` ranks of `python -m module` to their end; the exit code of the first that failed, else 0.

    SIGTERM, Ctrl-C and a closed terminal end every process: by SIGTERM at first; a second signal, or no end within
    GRACE_S seconds, kills. When one rank fails the others are ended. Nothing outlives this call. A code below 0 is
    that of a signal, to us or to a rank.
    """
    command = [sys.executable, "-m", module, *argv]
    with _meeting_place(processes) as meeting, _Ranks() as ranks:
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting} if meeting else {}
            ranks.start(command, _environment(processes) | place)
        return ranks.wait()


def name_of(code: int) -> str:
    """`exit code 1`, or `SIGKILL` of -9."""
    if code >= 0:
        return f"exit code {code}"
    often = " (often: the machine is out of memory)" if code == -signal.SIGKILL else ""
    return signal.Signals(-code).name + often


class _Ranks:
    """Processes that end together, each in a session of its own."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._asked: list[int] = []
        self._deadline = float("inf")

    def __enter__(self) -> Self:
        kept = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._forward) for number in kept}
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        for child in self._children:
            child.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        if not self._asked:
            child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
            self._children.append(child)
            if self._asked:  # while the process was being made
                self._signal(signal.SIGTERM)

    def wait(self) -> int:
        failed = 0
        while any(child.poll() is None for child in self._children):
            if not failed and (failed := self._first_failure()) and not self._asked:
                self._end_by(CLOSING_S)
                self._signal(signal.SIGTERM)
            if time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
            time.sleep(0.05)
        return -self._asked[0] if self._asked else failed or self._first_failure()

    def _first_failure(self) -> int:
        return next((child.returncode for child in self._children if child.poll()), 0)

    def _forward(self, number: int, _: FrameType | None) -> None:
        self._asked.append(number)
        self._end_by(GRACE_S)
        self._signal(signal.SIGTERM if len(self._asked) == 1 else signal.SIGKILL)

    def _end_by(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _signal(self, number: int) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)


@contextlib.contextmanager
def _meeting_place(processes: int) -> Iterator[dict[str, str]]:
    """Where ranks of this machine find each other: a store on a free port of the loopback interface, held by us.

    No port can be taken in between, and nothing listens to other machines.
    """
    if processes == 1:
        yield {}
        return
    from torch.distributed import TCPStore

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    only = {"GLOO_SOCKET_IFNAME": loopback.pop()} if loopback else {}
    yield {**address, **only, "WORLD_SIZE": str(processes)}
    del store


def _environment(processes: int) -> dict[str, str]:
    """Ours, with the project importable, the cores shared among the ranks, and no launcher's variables left over."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    root = str(Path(__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    env[LAUNCHER] = str(os.getpid())
    if processes > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    return env


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stage_main(
    options_of: Callable[[list[str]], type[C]], stage: str, description: str, run: Callable[[C], object]
) -> int:
    """The command line of one stage: the class of its options, parse, run. A user's mistake is one line and code 2."""
    _end_with_launcher()
    speak_plainly()
    # The deepspeed launcher adds --local_rank; the environment says it too.
    argv = [word for word in sys.argv[1:] if not re.match(r"--local[-_]rank=", word)]
    try:
        with _Patience():
            options = config.parse(options_of(argv), argv, f"python -m {stage}", description)
            from rlhf import checkpoint, record

            checkpoint.require_writable(options.output_dir)
            record.require_trackers(options.report_to)
            record.quiet_libraries()
            run(options)
    except UserError as error:
        give_up(f"error: {error}", MISTAKE)
    except KeyboardInterrupt:
        give_up("interrupted", 130)
    end_well()
    return 0


def end_well() -> None:
    """End a rank of several at once, with code 0: threads of the libraries can abort one that takes itself apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(0)


def speak_plainly() -> None:
    """Text that the terminal cannot show becomes '?' instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def give_up(message: str, code: int) -> NoReturn:
    """End this rank with one line. Rank 0 goes first, and its launcher then ends the others, who would say the same."""
    if _rank() > 0:
        time.sleep(PATIENCE_S)
    print(message, file=sys.stderr, flush=True)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # torchrun ends its own report with this
        said = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": said}), encoding="utf-8")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.stdout.flush()
        os._exit(code)  # at once: leaving the process group can take as long as the others wait
    raise SystemExit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


class _Patience:
    """Lets the rank that failed first speak first: one that only lost its peer, or is not rank 0, waits."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, SystemExit | UserError | KeyboardInterrupt) or error is None:
            return
        if _rank() > 0 or re.search(r"closed by peer|reset by peer|Broken pipe|NCCL|gloo", str(error)):
            time.sleep(PATIENCE_S)


def _end_with_launcher() -> None:
    """Linux: have the kernel send SIGTERM when the launcher is gone, even by SIGKILL."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        end_with_parent(int(launcher))


def end_with_parent(parent: int) -> None:
    """Linux: have the kernel send this process SIGTERM when its parent, of that id, is gone."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if parent != os.getppid():  # it was gone before that
        raise SystemExit(128 + signal.SIGTERM)
