"""Starts the processes of a stage on this machine, and ends every process that it started.

Importing this module must not import torch, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.distributed.addresses import LOOPBACK, interface_of
from rlhf.errors import UserError
from rlhf.launch import rank_variables
from rlhf.launch.failure_summary import has_unsaved_steps
from rlhf.launch.hosts import Deployment
from rlhf.launch.supervisor import GRACE_S, LAUNCHER, ExitStatus, GroupWatch, Ranks, Signals
from rlhf.shipped import ROOT

LAUNCHER_GRACE = "RLHF_GRACE_S"
OPTIONS_FILE = re.compile(r"\.(\w+)-\d+\.yaml")
"""name of the file with the options of a stage: the stage, and the process id of the chain"""


def options_file(output_dir: str, stage: str) -> Path:
    """Where the chain of this process writes the options of a stage: a path as the command line names it, because the
    ranks of all hosts run in the same directory."""
    return Path(output_dir) / f".{stage}-{os.getpid()}.yaml"


def run(module: str, argv: Sequence[str], target: int | Deployment = 1) -> ExitStatus:
    """Run `python -m module` in `target` processes of this machine, to their end; rlhf.launch.team runs several hosts.

    Returns the exit code of the first rank that failed, else 0; below 0 it is a signal, to this process or to a rank.
    rlhf.launch.supervisor.GroupWatch documents how signals and failures end all ranks. No process outlives this call.
    """
    deployment = target if isinstance(target, Deployment) else Deployment(target)
    processes, grace_s = deployment.processes, deployment.options.grace_s
    devices = visible_devices(deployment.slots)
    unsaved = partial(has_unsaved_steps, Path(*argv[1:2]).parent / module)  # of a stage: --config and its options_file
    command = [sys.executable, "-P", "-m", module, *argv]  # imports nothing from the current directory
    with Signals() as signals, _rendezvous(processes) as rendezvous, Ranks() as ranks:
        for rank in range(processes):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), **rendezvous} if rendezvous else {}
            environment = rank_environment(processes, grace_s) | variables | devices
            if not signals.waiting():
                ranks.start(rank, command, environment)
        return GroupWatch(ranks, signals, grace_s, unsaved).wait()


@contextlib.contextmanager
def _rendezvous(processes: int) -> Iterator[dict[str, str]]:
    """The environment variables by which ranks of this machine connect: a store on a free port of the loopback
    interface.

    This process holds the port, so that no other process can take it; no port is open to other machines.
    """
    if processes == 1:
        yield {}
        return
    store = hold_store(socket.create_server((LOOPBACK, 0)))
    address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    loopback = interface_of(LOOPBACK)
    interface = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    yield {**address, **interface, "WORLD_SIZE": str(processes)}
    del store


def hold_store(listening: socket.socket) -> Any:
    """A store on a socket that already listens; it exists as long as the object."""
    from torch.distributed import TCPStore

    address, port = listening.getsockname()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def rank_environment(processes: int, grace_s: float = GRACE_S) -> dict[str, str]:
    """The environment of one of `processes` ranks of this machine: the project is importable, the cores are divided,
    and variables of other launchers are removed."""
    env = {name: value for name, value in os.environ.items() if name not in rank_variables.RANK_VARIABLES}
    paths = env.get("PYTHONPATH", "").split(os.pathsep)  # an empty entry is the current directory
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *paths]))
    env["PYTHONSAFEPATH"] = "1"
    env |= {LAUNCHER: str(os.getpid()), LAUNCHER_GRACE: str(grace_s)}
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise it warns of addresses without names
    if processes > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
        env["LOCAL_WORLD_SIZE"] = str(processes)
    return env


def visible_devices(slots: Sequence[int], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that leaves a process the GPUs of these slots. Slot N is the Nth GPU that this process sees."""
    if not slots:
        return {}
    before = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if before is None else before.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(slot) if names is None else names[slot] for slot in slots)}


def local_processes(deployment_type: str, num_processes: int | None) -> int:
    """The number of processes on this machine.

    Raises: UserError if there are not so many devices.
    """
    all_devices = max(1, torch_gpus()) if deployment_type == "single_node" else 1
    require_devices("--num-processes", num_processes or all_devices)
    return num_processes or all_devices


def require_devices(option: str, wanted: int) -> int:
    """The most processes that this machine may run: its GPUs, or without one its cores, but at least 2.

    Raises: UserError if `wanted` processes are more.
    """
    gpus = torch_gpus()
    most = gpus or max(2, cores())
    if wanted > most:
        there = f"{gpus} GPUs are visible" if gpus else f"this machine has no GPU and {cores()} cores"
        raise UserError(f"{option} {wanted}: {there}, expected at most {most}; --plan takes --devices")
    return most


def torch_gpus() -> int:
    """GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int) -> None:
    """Linux: the kernel sends this process SIGTERM when its parent, of that process id, is gone."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if parent != os.getppid():  # it is already gone
        raise SystemExit(128 + signal.SIGTERM)
