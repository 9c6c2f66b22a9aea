"""The hosts of a run: which, how they are reached, and what of the environment goes there. Torch-free."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from rlhf.config import Config, suggest
from rlhf.distributed.addresses import is_here
from rlhf.errors import UserError
from rlhf.shipped import ROOT

NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
"""no name of a host may look like an option of ssh, or as --include separates them"""
TRAVELS = re.compile(
    r"(HF|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH|OMP|MKL|KMP|TRANSFORMERS|TOKENIZERS|DATASETS|DS|DEEPSPEED|TRITON|RLHF|LC)_\w+"
    r"|LANG|PYTHONPATH|PYTHONIOENCODING|PYTHONWARNINGS|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|UCX_\w+|FI_\w+"
    r"|WANDB_MODE|DO_NOT_TRACK|LD_LIBRARY_PATH"
)
"""the variables that every host gets as they are here"""
SECRET = re.compile(r"TOKEN(?!IZERS_)|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""no variable with such a name leaves this machine"""


class LaunchOptions(Config):
    """Which hosts there are, and how their processes are started and ended."""

    hostfile: str | None = None
    """hosts of multi_node, one 'name slots=N' a line, N processes each"""
    include: str | None = None
    """the hosts and slots to use: a@b:0,2 is all of a, and of b the slots 0 and 2"""
    exclude: str | None = None
    """the hosts and slots to leave out, written as for --include"""
    num_nodes: int | None = Field(None, ge=1)
    """the first so many hosts of those"""
    master_addr: str | None = None
    """address of the first host, at which the others find it; by default the one on its way to them"""
    master_port: int | None = Field(None, ge=1, le=65535)
    """port there; by default any that is free"""
    remote_shell: Literal["ssh", "srun"] = "ssh"
    """what starts a program on another host; srun inside a SLURM job"""
    ssh_port: int | None = Field(None, ge=1, le=65535)
    """by default what the configuration of ssh says"""
    rendezvous_timeout_s: float = Field(300.0, gt=0)
    """seconds in which every host and process must have come"""
    grace_s: float = Field(30.0, gt=0)
    """seconds from a signal that ends the run to the kill of the processes that are left"""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and the slots, numbered from 0, in each of which a process runs: on GPUs, slot N has GPU N."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """How many ranks there are, and on which hosts; with no hosts, all on this machine."""

    processes: int
    hosts: tuple[Host, ...] = ()
    options: LaunchOptions = field(default_factory=LaunchOptions)


def open_deployment(options: LaunchOptions) -> Deployment:
    """The ranks of the hosts of `--hostfile` that are chosen. Raises: UserError."""
    if options.hostfile is None:
        raise UserError(
            "--deployment-type multi_node: got no --hostfile, expected a file with one 'name slots=N' a line; "
            "for this machine alone single_node needs none"
        )
    hosts = choose(read_hostfile(options.hostfile), options)
    return Deployment(sum(len(host.slots) for host in hosts), hosts, options)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file in DeepSpeed's format: `name slots=N` a line, # begins a comment.

    Raises: UserError with the line of a mistake.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"--deployment-type multi_node: --hostfile {path}: cannot be read ({why}); expected one 'name slots=N' a "
            "line; for this machine alone use single_node"
        ) from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].strip()
        if not words:
            continue
        found = re.fullmatch(rf"({NAME.pattern})\s+slots=(\d+)", words)
        if found is None or int(found[2]) < 1:
            raise UserError(f"--hostfile {path}:{number}: got '{words}', expected 'name slots=N' with N above 0")
        if found[1] in hosts:
            raise UserError(f"--hostfile {path}:{number}: {found[1]} stands there twice; give it all slots in one line")
        hosts[found[1]] = Host(found[1], tuple(range(int(found[2]))))
    if not hosts:
        raise UserError(f"--hostfile {path}: names no host, expected one 'name slots=N' a line")
    return tuple(hosts.values())


def choose(hosts: Sequence[Host], options: LaunchOptions) -> tuple[Host, ...]:
    """The hosts and slots that --include or --exclude and --num-nodes leave, in the order of `hosts`.

    Raises: UserError if they name what is not there, or leave nothing.
    """
    if options.include is not None and options.exclude is not None:
        raise UserError("--include and --exclude: got both, expected one of them")
    chosen = list(hosts)
    if options.include is not None:
        wanted = _named(options.include, "--include", hosts)
        chosen = [Host(host.name, wanted[host.name]) for host in hosts if host.name in wanted]
    if options.exclude is not None:
        unwanted = _named(options.exclude, "--exclude", hosts)
        left = [Host(h.name, tuple(s for s in h.slots if s not in unwanted.get(h.name, ()))) for h in hosts]
        chosen = [host for host in left if host.slots]
    if not chosen:
        raise UserError(f"--exclude {options.exclude}: leaves no host of {', '.join(host.name for host in hosts)}")
    if options.num_nodes is not None and options.num_nodes > len(chosen):
        names = ", ".join(host.name for host in chosen)
        raise UserError(f"--num-nodes {options.num_nodes}: there are {len(chosen)} hosts: {names}")
    return tuple(chosen[: options.num_nodes])


def _named(text: str, option: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """The slots of each host in `a@b:0,2`."""
    known = {host.name: host.slots for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            raise UserError(f"{option} {text}: no host '{name}'{suggest(name, list(known))}; have {', '.join(known)}")
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise UserError(f"{option} {text}: got '{part}', expected host:0,2")
        slots = tuple(sorted({int(n) for n in numbers.split(",")})) if colon else known[name]
        if not set(slots) <= set(known[name]):
            raise UserError(f"{option} {text}: {name} has slots 0 to {len(known[name]) - 1}")
        found[name] = tuple(sorted({*found.get(name, ()), *slots}))
    return found


def command_on(host: str, command: Sequence[str], options: LaunchOptions) -> list[str]:
    """The command line that runs `command` on a host, its standard streams being ours. No word of it is a secret."""
    words = ["env", f"PYTHONPATH={ROOT}", *command]
    if options.remote_shell == "srun":
        where = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--unbuffered", "--kill-on-bad-exit=0"]
        return ["srun", *where, *words]
    if is_here(host):
        return words
    alive = ["ServerAliveInterval=15", "ServerAliveCountMax=4", f"ConnectTimeout={_connecting_s(options)}"]
    settings = [word for setting in ("BatchMode=yes", *alive) for word in ("-o", setting)]
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    return ["ssh", "-T", *settings, *port, "--", host, shlex.join(words)]


def _connecting_s(options: LaunchOptions) -> int:
    return max(1, min(60, round(options.rendezvous_timeout_s)))


def agent_command() -> list[str]:
    """The program that starts the ranks of one host; with this interpreter, and nothing of the current directory."""
    return [sys.executable, "-P", "-m", "rlhf.launch.host_agent"]


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """What of `environment` every host gets: settings of the libraries, and no secret."""
    return {n: value for n, value in environment.items() if TRAVELS.fullmatch(n) and not SECRET.search(n)}
