"""The hosts of a run, and the command of DeepSpeed's launcher that reaches them. Importing this imports no torch."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from rlhf.config import Config
from rlhf.distributed import addresses
from rlhf.errors import UserError

NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
"""names of hosts; a name must not be read as an option or by a shell"""
PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun", "mpich": "mpirun", "impi": "mpirun", "slurm": "srun"}
"""the program of each of DeepSpeed's launchers"""


class LaunchOptions(Config):
    """The hosts of a run, and how their processes are started and ended."""

    hostfile: str | None = None
    """hosts of multi_node, one 'name slots=N' a line, N processes each"""
    include: str | None = None
    """the hosts and slots to use, as deepspeed reads it: a@b:0,2 is all of a, and of b the slots 0 and 2"""
    exclude: str | None = None
    """the hosts and slots to exclude, in the syntax of --include"""
    num_nodes: int | None = Field(None, ge=1)
    """use only this number of hosts, the first ones of the hostfile"""
    num_gpus: int | None = Field(None, ge=1)
    """use this number of slots of each host, or of this machine without a hostfile; a slot is a GPU, on a machine
    without one a process"""
    launcher: Literal["pdsh", "openmpi", "mpich", "impi", "slurm"] = "pdsh"
    """DeepSpeed's launcher, which starts the processes of multi_node"""
    launcher_args: str | None = None
    """additional arguments for pdsh, mpirun or srun"""
    master_addr: str | None = None
    """address of this machine for the other hosts; by default that of the interface towards them"""
    master_port: int | None = Field(None, ge=1, le=65535)
    """port at that address; by default any free port"""
    rendezvous_timeout_s: float = Field(300.0, gt=0)
    """seconds within which every process must join"""
    grace_s: float = Field(30.0, gt=0)
    """seconds from a signal that ends the run until the remaining processes are killed; not while finished steps are in
    no checkpoint"""
    max_restarts: int = Field(0, ge=0)
    """how often a crashed stage is restarted automatically from its newest checkpoint"""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The number of ranks and their hosts; without hosts, all ranks are on this machine."""

    processes: int
    hosts: tuple[str, ...] = ()
    options: LaunchOptions = field(default_factory=LaunchOptions)
    slots: tuple[int, ...] = ()
    """without hosts: the numbers of the GPUs to use; none = all that are visible"""


def open_deployment(options: LaunchOptions, most: int) -> Deployment:
    """The ranks of the slots that --hostfile, --include, --exclude, --num-nodes and --num-gpus leave.

    DeepSpeed reads the options. Without a hostfile the slots are those of localhost. A single host that is this machine
    needs no launcher.

    most: slots of this machine
    Raises: UserError.
    """
    chosen = _choose_slots(options, most)
    hosts = list(chosen)
    if len(hosts) == 1 and addresses.is_this_host(hosts[0]):
        slots = tuple(chosen[hosts[0]])
        if slots and max(slots) >= most:
            raise UserError(f"{_subject(options)}: slot {max(slots)} of {hosts[0]}: expected one from 0 to {most - 1}")
        return Deployment(len(slots), options=options, slots=slots)
    program = PROGRAMS[options.launcher]
    if shutil.which(program) is None:
        raise UserError(
            f"--launcher {options.launcher}: no program {program} on PATH; install it, choose another launcher, or "
            "start this command on every host with torchrun or srun (docs/multi_node.md)"
        )
    from deepspeed.launcher import runner  # seconds of imports, for this alone

    try:
        runner.LAUNCHER_CLASSES[options.launcher].validate_active_resources(chosen)
    except ValueError as error:
        raise UserError(f"{_subject(options)}: {error}") from None
    return Deployment(sum(map(len, chosen.values())), tuple(hosts), options)


def _choose_slots(options: LaunchOptions, most: int) -> dict[str, list[int]]:
    """The chosen slots of each host. Raises: UserError."""
    if options.hostfile is not None and not Path(options.hostfile).is_file():
        raise UserError(
            f"--hostfile {options.hostfile}: no such file; expected one with 'name slots=N' a line; for this machine "
            "alone use --deployment-type single_node"
        )
    from deepspeed.launcher import runner  # seconds of imports, for this alone

    subject = _subject(options)
    try:
        slots = {"localhost": most} if options.hostfile is None else runner.fetch_hostfile(options.hostfile)
        chosen = runner.parse_inclusion_exclusion(slots, options.include or "", options.exclude or "")
    except ValueError as error:
        raise UserError(f"{subject}: {error}") from None
    for host in chosen:
        if NAME.fullmatch(host) is None:
            raise UserError(f"{subject}: got the host '{host}', expected a name or an address")
    if (options.num_nodes or 0) > len(chosen):
        raise UserError(f"--num-nodes {options.num_nodes}: expected at most {len(chosen)}: {', '.join(chosen)}")
    chosen = runner.apply_num_nodes_and_gpus(chosen, options.num_nodes or -1, options.num_gpus or -1)
    return dict(chosen)


def _subject(options: LaunchOptions) -> str:
    """The option that names the hosts or slots, for messages."""
    for name in ("hostfile", "include", "exclude", "num_gpus", "num_nodes"):
        value = getattr(options, name)
        if value is not None:
            return f"--{name.replace('_', '-')} {value}"
    return "--deployment-type"


def deepspeed_command(options: LaunchOptions, address: str, port: int, program: Sequence[str]) -> list[str]:
    """The command that runs a program and its arguments as every rank on the hosts, in the root of the project."""
    assert options.hostfile is not None
    words = ["--hostfile", os.path.abspath(options.hostfile), "--launcher", options.launcher, "--force_multi"]
    words += ["--master_addr", address, "--master_port", str(port), "--no_ssh_check", "--no_local_rank"]
    for name in ("include", "exclude", "num_nodes", "num_gpus", "launcher_args"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}={value}"]
    return [sys.executable, "-P", "-m", "deepspeed.launcher.runner", *words, *program]
