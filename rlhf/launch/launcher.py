"""Starting a stage: the launcher's side, which ends every process it began, and the side of the process begun.

Importing this module must not import torch, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from rlhf import console, errors, streams
from rlhf.config import parser
from rlhf.config.options import RunOptions, require_trackers
from rlhf.config.short_help import STAGE_GROUPS, Groups, short_help
from rlhf.distributed.addresses import LOOPBACK, interface_of
from rlhf.errors import UserError
from rlhf.launch import rank_variables
from rlhf.launch.hosts import Deployment
from rlhf.launch.supervisor import CLOSING_S as CLOSING_S
from rlhf.launch.supervisor import GRACE_S, IN_ORDER, LAUNCHER, MISTAKE, REQUEUE, Ended, Ranks, Signals, Watch
from rlhf.launch.supervisor import NON_FINITE as NON_FINITE
from rlhf.launch.supervisor import SAID as SAID
from rlhf.launch.supervisor import name_of as name_of
from rlhf.shipped import ROOT

C = TypeVar("C", bound=RunOptions)

PATIENCE_S = 5.0
"""a rank that has nothing of its own to say waits this long, to be ended by the launcher in silence"""
LEAST_FILES = 256
"""open files of one process: libraries, shards of data, checkpoints and sockets to other ranks"""
LAUNCHER_GRACE = "RLHF_GRACE_S"


def run(module: str, argv: Sequence[str], where: int | Deployment = 1) -> Ended:
    """Run `python -m module` in `where` processes of this machine, to their end; rlhf.launch.team does it on several.

    Returns the exit code of the first that failed, else 0; one below 0 is that of a signal, to us or to a rank.
    rlhf.launch.supervisor.Watch tells how signals and failures end all. Nothing outlives this call.
    """
    deployment = where if isinstance(where, Deployment) else Deployment(where)
    processes, grace_s = deployment.processes, deployment.options.grace_s
    command = [sys.executable, "-P", "-m", module, *argv]  # nothing of the current directory
    with Signals() as asked, _meeting_place(processes) as meeting, Ranks() as ranks:
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting} if meeting else {}
            if not asked.waiting():
                ranks.start(rank, command, rank_environment(processes, grace_s) | place)
        return Watch(ranks, asked, grace_s).follow()


@contextlib.contextmanager
def _meeting_place(processes: int) -> Iterator[dict[str, str]]:
    """Where ranks of this machine find each other: a store on a free port of the loopback interface, held by us.

    No port can be taken in between, and nothing listens to other machines.
    """
    if processes == 1:
        yield {}
        return
    store = hold_store(socket.create_server((LOOPBACK, 0)))
    address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    loopback = interface_of(LOOPBACK)
    only = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    yield {**address, **only, "WORLD_SIZE": str(processes)}
    del store


def hold_store(listening: socket.socket) -> Any:
    """A store behind a socket that listens already; it is there for as long as the object is."""
    from torch.distributed import TCPStore

    address, port = listening.getsockname()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def rank_environment(processes: int, grace_s: float = GRACE_S) -> dict[str, str]:
    """Ours, for one of so many ranks of this machine: with the project importable, the cores shared among them, and no
    other launcher's variables left over."""
    env = {name: value for name, value in os.environ.items() if name not in rank_variables.RANK_VARIABLES}
    paths = env.get("PYTHONPATH", "").split(os.pathsep)  # an empty one is the current directory
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *paths]))
    env["PYTHONSAFEPATH"] = "1"
    env |= {LAUNCHER: str(os.getpid()), LAUNCHER_GRACE: str(grace_s)}
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it says that addresses have no names
    if processes > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
        env["LOCAL_WORLD_SIZE"] = str(processes)
    return env


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_open_files() -> None:
    """Allow this process, and those that it starts, LEAST_FILES open files.

    Raises: UserError if the system does not let it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= LEAST_FILES or soft == resource.RLIM_INFINITY:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, hard))
    except (OSError, ValueError):
        raise UserError(
            f"got a limit of {hard} open files, expected {LEAST_FILES} or more; raise it (ulimit -n {LEAST_FILES})"
        ) from None


@contextlib.contextmanager
def requeued_when_asked() -> Iterator[None]:
    """Between stages SIGUSR1 ends the chain with code REQUEUE: there is nothing to save."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(REQUEUE)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def stage_main(
    options_of: Callable[[list[str]], type[C]],
    stage: str,
    description: str,
    groups: Groups,
    run: Callable[[C], object],
) -> int:
    """The command line of one stage: the class of its options, parse, run. A user's mistake is one line and code 2.

    `groups`: what `--help` lists beside what every stage has.
    """
    _end_with_launcher()
    streams.ignore_broken_streams()
    program = console.program(f"python -m {stage}")
    argv = rank_variables.without_local_rank(sys.argv[1:])
    try:
        with requeued_when_asked(), _Patience():
            require_open_files()
            rank_variables.adopt(os.environ)
            console.loading(stage, argv)
            if {"--help", "-h"} & {*argv}:
                print(short_help(options_of(argv), program, description, {**groups, **STAGE_GROUPS}))
                return 0
            options = parser.parse(options_of(argv), argv, program, description)
            from rlhf.distributed import rendezvous
            from rlhf.storage import manifests

            rendezvous.check_ranks(options)
            manifests.require_writable(options.output_dir, stage)
            require_trackers(options.report_to)
            console.quiet_libraries()
            run(options)
    except UserError as error:
        give_up(f"error: {error}{_kept_traceback(error, stage, argv)}", MISTAKE)
    except OSError as error:
        if errors.system_error_line(error) is None:
            raise
        give_up(f"error: {errors.system_error_line(error)}", MISTAKE)
    except KeyboardInterrupt:
        give_up("interrupted", 130)
    end_well()
    return 0


def _kept_traceback(error: UserError, stage: str, argv: Sequence[str]) -> str:
    """Where the traceback lies of what a user's own code has raised; nothing is written for other mistakes."""
    folder = Path(parser.peek(argv, "output-dir", RunOptions().output_dir)) / stage
    if error.__cause__ is None or not folder.is_dir():
        return ""
    path = folder / f"traceback-{rank_variables.rank()}.txt"
    with contextlib.suppress(OSError):
        path.write_text("".join(traceback.format_exception(error.__cause__)), encoding="utf-8")
        return f"; the traceback is in {path}"
    return ""


def end_well() -> None:
    """End a rank of several at once, with code 0: threads of the libraries can abort one that takes itself apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    if rank_variables.world_size() > 1:
        os._exit(0)


def give_up(message: str, code: int) -> NoReturn:
    """End this rank with one line. Rank 0 goes first, and its launcher then ends the others, who would say the same."""
    if rank_variables.rank() > 0:
        _wait_to_be_ended()
    if rank_variables.rank() == 0 or code not in IN_ORDER:
        print(message, file=sys.stderr, flush=True)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # torchrun ends its own report with this
        said = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": said}), encoding="utf-8")
    if rank_variables.world_size() > 1:
        sys.stdout.flush()
        os._exit(code)  # at once: leaving the process group can take as long as the others wait
    raise SystemExit(code)


def _wait_to_be_ended() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run only remembers it
    time.sleep(PATIENCE_S)


class _Patience:
    """Lets the rank that failed first speak first: one that only lost its peer, or is not rank 0, waits."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, SystemExit | UserError | KeyboardInterrupt) or error is None:
            return
        if rank_variables.rank() > 0 or re.search(r"closed by peer|reset by peer|Broken pipe|NCCL|gloo", str(error)):
            _wait_to_be_ended()


def _end_with_launcher() -> None:
    """When the launcher is gone, even by SIGKILL, end: asked by SIGTERM on Linux, and killed if that is no help."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    end_with_parent(int(launcher))
    grace_s = float(os.environ.get(LAUNCHER_GRACE, GRACE_S))
    threading.Thread(target=_outlive_by, args=(int(launcher), grace_s), daemon=True).start()


def _outlive_by(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent(parent: int) -> None:
    """Linux: have the kernel send this process SIGTERM when its parent, of that id, is gone."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if parent != os.getppid():  # it was gone before that
        raise SystemExit(128 + signal.SIGTERM)
