"""The rendezvous of a stage's ranks: checks for missing ranks, and for different options or code.

The ranks exchange JSON through a key-value store, before any data is read or model loaded.
"""

import datetime
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from rlhf.config import Tree
from rlhf.config.options import RunOptions
from rlhf.distributed import addresses
from rlhf.errors import UserError
from rlhf.storage import manifests

TIMEOUT = "RLHF_RENDEZVOUS_TIMEOUT_S"
TIMEOUT_S = 300.0
PART = "RLHF_STORE_PART"
"""environment variable with the prefix of the launcher's store under which the ranks of this run meet"""
VISIBLE_S = 30.0
"""seconds in which a file that one host writes must become visible to the others"""
VERDICT_S = 30.0
"""seconds that a rank waits for the verdict after rank 0 has stopped waiting"""
MAX_SHOWN = 4
"""differences that an error lists"""


def is_multi_process() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def _is_one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def timeout_s() -> float:
    """Seconds in which every rank must arrive."""
    return float(os.environ.get(TIMEOUT, TIMEOUT_S))


def store() -> Store:
    """The store of this run. torchrun and our launcher provide one; otherwise rank 0 listens at MASTER_ADDR only.

    Raises: UserError if it cannot be reached, its port is taken, or the launcher does not say where it is.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"the launcher has set RANK and WORLD_SIZE, but not {' and '.join(missing)}; set the host of rank 0 and a "
            "free port of it for all processes, as in mpirun -x MASTER_ADDR=n01 -x MASTER_PORT=29500"
        )
    endpoint = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"]))
    exists = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return part_of(_connect(*endpoint, exists, timeout_s()))


def part_of(whole: Store) -> Store:
    """The part of a launcher's store that belongs to this run, and to this attempt of torchrun."""
    return PrefixStore(f"rlhf/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{os.environ.get(PART, '')}", whole)


def group_store() -> Store:
    """A prefix of the store that no earlier process group of these ranks has used."""
    run_store = store()
    number = run_store.add(f"groups/{os.environ['RANK']}", 1)
    return PrefixStore(f"group {number}", run_store)


@cache
def _connect(address: str, port: int, rank: int, exists: bool, seconds: float) -> TCPStore:
    """Cached, because the store must exist as long as the process."""
    patience = datetime.timedelta(seconds=seconds)
    if rank == 0 and not exists:
        listening = addresses.listen(address, port, "MASTER_PORT")
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=listening.detach()
        )
    try:
        return TCPStore(address, port, is_master=False, timeout=patience)
    except DistError:
        raise UserError(
            f"rank {rank} on {socket.gethostname()}: nothing answers at {address}:{port} within {seconds:g} s; start "
            f"the first host too, check the address and the firewall, or raise {TIMEOUT}"
        ) from None


def choose_interface() -> None:
    """Let gloo and NCCL use the interface on the route to the other hosts; on a single host, the loopback interface.

    By default gloo uses the address of the host's name, often 127.0.1.1, and then waits forever. Values that the user
    set in the environment take precedence.
    """
    address = addresses.LOOPBACK if _is_one_host() else addresses.address_towards(os.environ["MASTER_ADDR"])
    interface = None if address is None else addresses.interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not _is_one_host():
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def check_ranks(options: RunOptions, stage: str) -> None:
    """Wait for every rank, and check that all agree. Does nothing for a single process.

    Raises: UserError, on every rank, if one is missing after RLHF_RENDEZVOUS_TIMEOUT_S, or has different options, code
    or versions, or alone sees that the stage is finished.
    """
    if not is_multi_process():
        return
    entry = {"host": socket.gethostname(), "has": shared_properties(options, stage)}
    require_agreement(store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), entry, timeout_s())


def require_agreement(store: Store, rank: int, size: int, entry: Tree, seconds: float) -> None:
    """Rank 0 compares what the ranks have that arrive within `seconds`; all ranks get its verdict.

    entry: this rank's host, and what it has. Raises: UserError with the verdict, if a rank is missing or differs.
    """
    store.set(f"here/{rank}", json.dumps(entry))
    if rank == 0:
        values = _collect(store, size, seconds)
        store.set("verdict", json.dumps(describe_differences(values, size)))
        # The store may end with this process, so the others read first.
        wait_until(lambda: store.add("read", 0) >= len(values) - 1, VERDICT_S)
    elif not (
        wait_until(lambda: store.check(["here/0"]), seconds)
        and wait_until(lambda: store.check(["verdict"]), seconds + VERDICT_S)
    ):
        raise UserError(f"rank 0 did not arrive within {seconds:g} s; start the first host too")
    verdict = json.loads(store.get("verdict"))
    if rank > 0:
        store.add("read", 1)
    if verdict is not None:
        raise UserError(verdict)


def _collect(store: Store, size: int, seconds: float) -> dict[int, Tree]:
    """What each rank has that arrives in time."""
    missing = set(range(size))

    def all_arrived() -> bool:
        missing.difference_update([rank for rank in missing if store.check([f"here/{rank}"])])
        return not missing

    wait_until(all_arrived, seconds)
    return {rank: json.loads(store.get(f"here/{rank}")) for rank in range(size) if rank not in missing}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# --- the same on every rank


def shared_properties(options: RunOptions, stage: str) -> dict[str, str]:
    """name -> value of what all ranks must share: options, versions (of this program a digest of its code), digests of
    user files, and whether the stage is finished: a rank that has nothing to do would leave the others waiting."""
    values = options.model_dump(mode="json")
    properties = {f"--{name.replace('_', '-')}": json.dumps(value) for name, value in values.items()}
    properties |= {
        name: version for name, version in manifests.versions().items() if name not in ("python", "platform")
    }
    properties["python"] = ".".join(map(str, sys.version_info[:2]))
    user_files = [path for path in re.findall(r"[\w./~-]+\.py\b", json.dumps(values)) if Path(path).is_file()]
    manifest = Path(options.output_dir) / stage / manifests.MANIFEST
    finished = {str(manifest): "finished"} if manifest.is_file() else {}
    return properties | finished | {path: str(manifests.digest(Path(path))["sha256"]) for path in user_files}


def describe_differences(values: Mapping[int, Tree], size: int) -> str | None:
    """An error message: the missing of `size` ranks, else how the first rank that differs from rank 0 does so. None if
    all agree."""
    missing = [rank for rank in range(size) if rank not in values]
    if missing:
        hosts = ", ".join(dict.fromkeys(str(value["host"]) for value in values.values()))
        return (
            f"{len(missing)} of {size} ranks did not arrive within {timeout_s():g} s: rank "
            f"{', '.join(map(str, missing))}; ranks of {hosts} are there; start the others too, or raise {TIMEOUT}"
        )
    first = values[0]
    for rank, other in values.items():
        properties, first_properties = other["has"], first["has"]
        names = [
            name for name in {**first_properties, **properties} if properties.get(name) != first_properties.get(name)
        ]
        if names:
            listed = "; ".join(
                _describe_difference(name, properties.get(name), first_properties.get(name))
                for name in names[:MAX_SHOWN]
            )
            more = f"; {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
            return (
                f"rank {rank} on {other['host']} differs from rank 0 on {first['host']}: {listed}{more}; "
                "every host needs the same options, code and libraries, and all share one --output-dir"
            )
    return None


def _describe_difference(name: str, value: str | None, first_value: str | None) -> str:
    if value is None or first_value is None:
        return f"{name} {'is missing' if value is None else 'is there'}"
    return f"{name} differs" if name.endswith(".py") else f"{name} {value}, not {first_value}"
