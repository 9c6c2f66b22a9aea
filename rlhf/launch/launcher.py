"""Starts the processes of a stage on this machine, and ends every process that it started.

Importing this module must not import torch, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf.distributed.addresses import LOOPBACK, interface_of
from rlhf.errors import UserError
from rlhf.launch import rank_variables
from rlhf.launch.hosts import Deployment
from rlhf.launch.supervisor import GRACE_S, LAUNCHER, Ended, Ranks, Signals, Watch
from rlhf.shipped import ROOT

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


def end_with_parent(parent: int) -> None:
    """Linux: have the kernel send this process SIGTERM when its parent, of that id, is gone."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if parent != os.getppid():  # it was gone before that
        raise SystemExit(128 + signal.SIGTERM)
