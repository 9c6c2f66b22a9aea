"""The rendezvous of a stage's ranks: checks for missing ranks, different options or code, and a shared directory.

The ranks exchange JSON through a key-value store, before any data is read or model loaded.
"""

import datetime
import hashlib
import json
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from rlhf.config import Tree
from rlhf.config.options import RunOptions
from rlhf.distributed import addresses
from rlhf.errors import UserError
from rlhf.shipped import PACKAGES, ROOT
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


def check_ranks(options: RunOptions) -> None:
    """Wait for every rank, and check that all agree. Does nothing for a single process.

    Raises: UserError, on every rank, if one is missing after RLHF_RENDEZVOUS_TIMEOUT_S, has different options, code or
    versions, or does not see the output directory.
    """
    if not is_multi_process():
        return
    rank_check = RankCheck(store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    own = {"host": socket.gethostname(), "has": shared_properties(options)}
    rank_check.require_agreement("here", own, timeout_s(), lambda values: describe_differences(values, rank_check.size))
    if not _is_one_host():
        rank_check.require_shared(Path(options.output_dir))


@dataclass(frozen=True, slots=True)
class RankCheck:
    """This rank's part in checks of all ranks through `store`."""

    store: Store
    rank: int
    size: int

    def require_agreement(
        self, name: str, own_value: Tree, seconds: float, judge: Callable[[Mapping[int, Tree]], str | None]
    ) -> None:
        """Rank 0 judges the values of the ranks that arrive within `seconds`; all ranks get its verdict.

        judge(rank -> value): an error message, or None. Raises: UserError with the verdict, if it is not None.
        """
        store, verdict_key = self.store, f"{name}/verdict"
        store.set(f"{name}/{self.rank}", json.dumps(own_value))
        if self.rank == 0:
            values = self._collect(name, seconds)
            store.set(verdict_key, json.dumps(judge(values)))
            # The store may end with this process, so the others read first.
            wait_until(lambda: store.add(f"{name}/read", 0) >= len(values) - 1, VERDICT_S)
        elif not (
            wait_until(lambda: store.check([f"{name}/0"]), seconds)
            and wait_until(lambda: store.check([verdict_key]), seconds + VERDICT_S)
        ):
            raise UserError(f"rank 0 did not arrive within {seconds:g} s; start the first host too")
        decision = json.loads(store.get(verdict_key))
        if self.rank > 0:
            store.add(f"{name}/read", 1)
        if decision is not None:
            raise UserError(decision)

    def _collect(self, name: str, seconds: float) -> dict[int, Tree]:
        """The value of each rank that arrives in time."""
        missing = set(range(self.size))

        def all_arrived() -> bool:
            missing.difference_update([rank for rank in missing if self.store.check([f"{name}/{rank}"])])
            return not missing

        wait_until(all_arrived, seconds)
        arrived = sorted(set(range(self.size)) - missing)
        return {rank: json.loads(self.store.get(f"{name}/{rank}")) for rank in arrived}

    def require_shared(self, directory: Path) -> None:
        """Raises: UserError, on every rank, unless all ranks see a file that rank 0 writes beside the output."""
        path: Path | None = None
        write_error = ""
        if self.rank > 0:
            written_path = self.store.get("shared/path").decode()
            is_visible = not written_path or wait_until(Path(written_path).is_file, VISIBLE_S)
        else:
            existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir()).absolute()
            path = existing / f".rlhf-shared-{uuid.uuid4().hex}"
            try:
                path.touch()
            except OSError as error:
                write_error = f"rank 0 cannot write to {existing} ({error.strerror})"
            is_visible = not write_error
            self.store.set("shared/path", "" if write_error else str(path))
        try:
            own_value = {"host": socket.gethostname(), "seen": is_visible, "trouble": write_error}
            self.require_agreement(
                "shared", own_value, VISIBLE_S + VERDICT_S, lambda values: _describe_unshared(values, directory)
            )
        finally:
            if path is not None:
                path.unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# --- the same on every rank


def shared_properties(options: RunOptions) -> dict[str, str]:
    """name -> value of what all ranks must share: options, versions, and digests of the code and of user files."""
    values = options.model_dump(mode="json")
    properties = {f"--{name.replace('_', '-')}": json.dumps(value) for name, value in values.items()}
    properties |= {
        name: version for name, version in manifests.versions().items() if name not in ("python", "platform")
    }
    properties["python"] = ".".join(map(str, sys.version_info[:2]))
    user_files = [path for path in re.findall(r"[\w./~-]+\.py\b", json.dumps(values)) if Path(path).is_file()]
    return properties | dict(_code_digests()) | {path: _digest(Path(path)) for path in user_files}


def _code_digests() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), _digest(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


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
                "every host needs the same options, code and libraries"
            )
    return None


def _describe_difference(name: str, value: str | None, first_value: str | None) -> str:
    if value is None or first_value is None:
        return f"{name} {'is missing' if value is None else 'is there'}"
    return f"{name} differs" if name.endswith(".py") else f"{name} {value}, not {first_value}"


# --- one directory


def _describe_unshared(values: Mapping[int, Tree], directory: Path) -> str | None:
    if values[0]["trouble"]:
        return f"--output-dir {directory}: {values[0]['trouble']}; name another"
    hosts = list(dict.fromkeys(value["host"] for value in values.values() if not value["seen"]))
    if not hosts:
        return None
    return (
        f"--output-dir {directory}: {', '.join(hosts)} does not see what rank 0 on {values[0]['host']} writes there; "
        "it must be one directory that all hosts share"
    )
