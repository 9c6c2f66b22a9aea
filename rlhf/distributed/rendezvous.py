"""Where the ranks of a stage first meet: who is missing, whether all have the same, and see the same directory.

All of it goes through a key-value store, as JSON, before any data is read or model loaded.
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
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from rlhf.config.options import RunOptions
from rlhf.distributed import addresses
from rlhf.errors import UserError
from rlhf.shipped import PACKAGES, ROOT
from rlhf.storage import manifests

TIMEOUT = "RLHF_RENDEZVOUS_TIMEOUT_S"
TIMEOUT_S = 300.0
PART = "RLHF_STORE_PART"
"""variable that names the part of a launcher's store in which the ranks of this run meet"""
SHARED_S = 30.0
"""in which a file that rank 0 writes must show to every other rank"""
READING_S = 30.0
"""that a rank waits for the verdict of rank 0 after the latter has stopped waiting"""
SHOWN = 4
"""differences that are named"""


def several() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def _one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def timeout_s() -> float:
    """Seconds in which every rank must have come."""
    return float(os.environ.get(TIMEOUT, TIMEOUT_S))


def store() -> Store:
    """The store of this run: torchrun and our launcher hold one; otherwise rank 0 does, at MASTER_ADDR alone.

    Raises: UserError if it cannot be reached, or its port is taken.
    """
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"]))
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return part_of(_connect(*place, held, timeout_s()))


def part_of(whole: Store) -> Store:
    """The part of a launcher's store that belongs to this run, and to this attempt of torchrun."""
    return PrefixStore(f"rlhf/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{os.environ.get(PART, '')}", whole)


def group_store() -> Store:
    """A part of the store that no earlier process group of these ranks has used."""
    whole = store()
    number = whole.add(f"groups/{os.environ['RANK']}", 1)
    return PrefixStore(f"group {number}", whole)


@cache
def _connect(address: str, port: int, rank: int, held: bool, seconds: float) -> TCPStore:
    """One store a process: it must be there for as long as the process is."""
    patience = datetime.timedelta(seconds=seconds)
    if rank == 0 and not held:
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
    """Have gloo and NCCL use the interface on the way to the others; alone on a host, the loopback interface.

    By itself gloo takes the address of the host's name, often 127.0.1.1, and then waits for ever. What the environment
    says goes before.
    """
    towards = addresses.LOOPBACK if _one_host() else addresses.address_towards(os.environ["MASTER_ADDR"])
    interface = None if towards is None else addresses.interface_of(towards)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not _one_host():
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def meet(options: RunOptions) -> None:
    """Wait for every rank; one process alone has none to wait for.

    Raises: UserError, on every rank, if one is missing after RLHF_RENDEZVOUS_TIMEOUT_S, has other options, code or
    versions, or does not see the output directory.
    """
    if not several():
        return
    ranks = Meeting(store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    own = {"host": socket.gethostname(), "has": what_must_agree(options)}
    ranks.agree("here", own, timeout_s(), lambda said: differences(said, ranks.size))
    if not _one_host():
        ranks.require_shared(Path(options.output_dir))


@dataclass(frozen=True, slots=True)
class Meeting:
    """This rank among all, who speak through `store`."""

    store: Store
    rank: int
    size: int

    def agree(self, name: str, own: Any, seconds: float, judge: Callable[[Mapping[int, Any]], str | None]) -> None:
        """Rank 0 looks at what every rank has to say, of those that came within `seconds`; its verdict is for all.

        Raises: UserError with the verdict, if there is one.
        """
        store, verdict = self.store, f"{name}/verdict"
        store.set(f"{name}/{self.rank}", json.dumps(own))
        if self.rank == 0:
            said = self._said(name, seconds)
            store.set(verdict, json.dumps(judge(said)))
            # The store may end with us, so the others read first.
            _until(lambda: store.add(f"{name}/read", 0) >= len(said) - 1, READING_S)
        elif not (
            _until(lambda: store.check([f"{name}/0"]), seconds)
            and _until(lambda: store.check([verdict]), seconds + READING_S)
        ):
            raise UserError(f"rank 0 did not come within {seconds:g} s; start the first host too")
        found = json.loads(store.get(verdict))
        if self.rank > 0:
            store.add(f"{name}/read", 1)
        if found is not None:
            raise UserError(found)

    def _said(self, name: str, seconds: float) -> dict[int, Any]:
        """What each rank says, of those that come in time."""
        missing = set(range(self.size))

        def came() -> bool:
            missing.difference_update([rank for rank in missing if self.store.check([f"{name}/{rank}"])])
            return not missing

        _until(came, seconds)
        there = sorted(set(range(self.size)) - missing)
        return {rank: json.loads(self.store.get(f"{name}/{rank}")) for rank in there}

    def require_shared(self, directory: Path) -> None:
        """Raises: UserError, on every rank, unless a file that rank 0 writes where the output goes shows to all."""
        path: Path | None = None
        trouble = ""
        if self.rank > 0:
            shown = self.store.get("shared/path").decode()
            seen = not shown or _until(Path(shown).is_file, SHARED_S)
        else:
            there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir()).absolute()
            path = there / f".rlhf-shared-{uuid.uuid4().hex}"
            try:
                path.touch()
            except OSError as error:
                trouble = f"rank 0 cannot write to {there} ({error.strerror})"
            seen = not trouble
            self.store.set("shared/path", "" if trouble else str(path))
        try:
            own = {"host": socket.gethostname(), "seen": seen, "trouble": trouble}
            self.agree("shared", own, SHARED_S + READING_S, lambda said: _unseen(said, directory))
        finally:
            if path is not None:
                path.unlink(missing_ok=True)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# --- the same on every rank


def what_must_agree(options: RunOptions) -> dict[str, str]:
    """Options, versions, and digests of the project's code and of the Python files that options name, each by name."""
    values = options.model_dump(mode="json")
    found = {f"--{name.replace('_', '-')}": json.dumps(value) for name, value in values.items()}
    found |= {name: version for name, version in manifests.versions().items() if name not in ("python", "platform")}
    found["python"] = ".".join(map(str, sys.version_info[:2]))
    own = [path for path in re.findall(r"[\w./~-]+\.py\b", json.dumps(values)) if Path(path).is_file()]
    return found | dict(_code()) | {path: _digest(Path(path)) for path in own}


def _code() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), _digest(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def differences(said: Mapping[int, Any], size: int) -> str | None:
    """Who is missing of `size` ranks, else how the first rank that has something else differs from rank 0; None if
    nothing is wrong."""
    missing = [rank for rank in range(size) if rank not in said]
    if missing:
        here = ", ".join(dict.fromkeys(str(one["host"]) for one in said.values()))
        return (
            f"{len(missing)} of {size} ranks did not come within {timeout_s():g} s: rank {_ranges(missing)}; there are "
            f"those of {here}; start the others too, or raise {TIMEOUT}"
        )
    first = said[0]
    for rank, other in said.items():
        one, two = other["has"], first["has"]
        names = [name for name in {**two, **one} if one.get(name) != two.get(name)]
        if names:
            shown = "; ".join(_difference(name, one.get(name), two.get(name)) for name in names[:SHOWN])
            more = f"; {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            return (
                f"rank {rank} on {other['host']} is not like rank 0 on {first['host']}: {shown}{more}; "
                "every host needs the same options, code and libraries"
            )
    return None


def _difference(name: str, one: str | None, other: str | None) -> str:
    if one is None or other is None:
        return f"{name} {'is missing' if one is None else 'is there'}"
    return f"{name} differs" if name.endswith(".py") else f"{name} {one}, not {other}"


def _ranges(ranks: list[int]) -> str:
    """`1-3, 6` of [1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# --- one directory


def _unseen(said: Mapping[int, Any], directory: Path) -> str | None:
    if said[0]["trouble"]:
        return f"--output-dir {directory}: {said[0]['trouble']}; name another"
    blind = list(dict.fromkeys(one["host"] for one in said.values() if not one["seen"]))
    if not blind:
        return None
    return (
        f"--output-dir {directory}: {', '.join(blind)} does not see what rank 0 on {said[0]['host']} writes there; it "
        "must be one directory that all hosts share"
    )
