"""Ranks on several hosts: the chain leads them, and a follower beside each rank starts what the leader orders.

torchrun, deepspeed, accelerate or srun starts the chain as many processes: that of rank 0 leads, the others follow.
With --hostfile the chain leads from outside, and has DeepSpeed's launcher start a follower for each rank. They speak
through a store (torch's TCPStore), in which the ranks of each stage meet too. When the store is gone, so is the leader,
and a follower ends its rank, first by SIGTERM.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore, Store

from rlhf.distributed import addresses, rendezvous
from rlhf.errors import UserError, run_as_user
from rlhf.launch import rank_variables
from rlhf.launch.hosts import Deployment, LaunchOptions, deepspeed_command
from rlhf.launch.launcher import end_with_parent, hold_store, rank_environment
from rlhf.launch.supervisor import CLOSING_S, MISTAKE, POLL_S, TERMINATED, Ended, RankEnd, Ranks, Signals, Watch
from rlhf.shipped import ROOT

LISTENING_S = 0.25
"""how often a follower asks the store for news"""
SHARED_S = 30.0
"""in which a file of the leader must show on every other host"""


class _Series:
    """Values in a store, which anyone may add to and everyone reads in their order."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._read = store, name, 0

    def add(self, value: Any) -> None:
        number = self._store.add(f"{self._name}/count", 1) - 1
        self._store.set(f"{self._name}/{number}", json.dumps(value))

    def next(self) -> Any:
        """The first value that was not read yet; None if there is none. Raises: DistError if the store is gone."""
        key = f"{self._name}/{self._read}"
        if not self._store.check([key]):
            return None
        self._read += 1
        return json.loads(self._store.get(key))


@dataclass(frozen=True, slots=True)
class Order:
    """A stage for every rank, `python -m module *argv` in `directory`; without a module, to end with `code`."""

    number: int
    module: str = ""
    argv: Sequence[str] = ()
    directory: str = ""
    grace_s: float = 0.0
    timeout_s: float = 0.0
    code: int = 0

    def start(self, ranks: Ranks) -> None:
        """Start the rank whose variables this process has. Raises: UserError if the leader's files are not here."""
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise UserError(f"{self.directory}: {error.strerror}; it must be there on every host") from None
        shared = self.argv[self.argv.index("--config") + 1] if "--config" in self.argv else "."
        if not _until(Path(shared).exists, SHARED_S):
            raise UserError(
                f"{shared} does not show within {SHARED_S:.0f} s; the output directory must be one that all hosts share"
            )
        kept = {name: os.environ[name] for name in rank_variables.RANK_VARIABLES if name in os.environ}
        kept |= {"TORCHELASTIC_USE_AGENT_STORE": "True", rendezvous.PART: str(self.number)}
        environment = rank_environment(int(kept.get("LOCAL_WORLD_SIZE", 1)), self.grace_s)
        command = [sys.executable, "-P", "-m", self.module, *self.argv]
        environment |= {rendezvous.TIMEOUT: str(self.timeout_s)} | kept
        ranks.start(rank_variables.rank(), command, environment)


class Team:
    """The ranks of all hosts, led from here; those of our own process too, if it is one of them. A Group."""

    def __init__(self, store: Store, size: int, own: bool, starter: "subprocess.Popen[bytes] | None" = None) -> None:
        self._store = PrefixStore("team", store)
        self._orders = _Series(self._store, "orders")
        self._number = self._kills = 0
        self._own, self._starter = own, starter
        self.size = size

    def run(self, module: str, argv: Sequence[str], options: LaunchOptions) -> Ended:
        """Run `python -m module` as every rank, to their end; supervisor.Watch tells how all end."""
        self._number, self._kills = self._number + 1, 0
        self._signals = _Series(self._store, f"{self._number}/signals")
        self._ends = _Series(self._store, f"{self._number}/ends")
        self._running = set(range(self.size))
        order = Order(self._number, module, argv, os.getcwd(), options.grace_s, options.rendezvous_timeout_s)
        with Signals() as asked, Ranks() as self._ranks:
            self._orders.add(asdict(order))
            if self._own:
                order.start(self._ranks)
            return Watch(self, asked, options.grace_s).follow()

    def running(self) -> list[int]:
        return sorted(self._running)

    def poll(self) -> list[RankEnd]:
        host = socket.gethostname()
        ended = [replace(end, host=host) for end in self._ranks.poll()]
        started = self._starter is None or self._starter.poll() is None
        lost = "" if started else "the launcher that started it has ended"
        try:
            while (told := self._ends.next()) is not None:
                ended.append(RankEnd(**told))
        except DistError:
            lost = "the store of the launcher is gone"
        if self._kills > 1:
            lost = lost or "its host did not answer"
        ended = [end for end in ended if end.rank in self._running]
        self._running -= {end.rank for end in ended}
        if lost:
            ended += [RankEnd(rank, 1, lost=lost) for rank in self.running() if rank not in self._ranks.running()]
            self._running &= set(self._ranks.running())
        return ended

    def signal(self, number: int) -> None:
        self._kills += number == signal.SIGKILL
        self._ranks.signal(number)
        with contextlib.suppress(DistError):
            self._signals.add(int(number))

    def dismiss(self, code: int) -> None:
        """Have the followers end with `code`, and wait until those that are there know it."""
        followers = self.size - self._own
        with contextlib.suppress(DistError):
            self._orders.add(asdict(Order(self._number + 1, code=code)))
            _until(lambda: self._store.add("dismissed", 0) >= followers, CLOSING_S)


@contextlib.contextmanager
def lead() -> Iterator[Team]:
    """Lead the processes that another launcher has started with this one, its rank 0. They end with our exit code."""
    end_with_parent(os.getppid())
    team = Team(rendezvous.store(), rank_variables.world_size(), own=True)
    code = 1
    try:
        yield team
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    except UserError:
        code = MISTAKE
        raise
    finally:
        team.dismiss(code)


@contextlib.contextmanager
def start(deployment: Deployment) -> Iterator[Team]:
    """Lead the ranks of the deployment's hosts, which DeepSpeed's launcher starts. Raises: UserError."""
    options = deployment.options
    others = [host for host in deployment.hosts if not addresses.is_this_host(host)]
    address = options.master_addr or (addresses.first_address(others) if others else addresses.LOOPBACK)
    if address is None:
        raise UserError("no way to the hosts is known; give --master-addr, an address of this machine that they reach")
    listening = addresses.listen(address, options.master_port or 0, "--master-port")
    port = listening.getsockname()[1]
    store = rendezvous.part_of(hold_store(listening))
    with Ranks() as starters:
        command = deepspeed_command(options, address, port, [__file__, address, str(port)])
        starter = starters.start(0, command, rank_environment(1), cwd=ROOT)
        team = Team(store, deployment.processes, own=False, starter=starter)
        try:
            yield team
        finally:
            team.dismiss(0)  # the leader's own code counts, and launchers make much of another
            _until(lambda: starter.poll() is not None, CLOSING_S)


class _Follower:
    """One rank, which a leader watches from afar: a Group, for the Watch of its own process."""

    def __init__(self, ranks: Ranks, store: Store, number: int, asked: Signals) -> None:
        self._ranks, self._asked = ranks, asked
        self._signals = _Series(store, f"{number}/signals")
        self._ends = _Series(store, f"{number}/ends")
        self._next = 0.0
        self.alone = False

    def running(self) -> list[int]:
        return self._ranks.running()

    def poll(self) -> list[RankEnd]:
        ended = self._ranks.poll()
        try:
            for end in ended:
                self.tell(end)
            if time.monotonic() > self._next:
                self._next = time.monotonic() + LISTENING_S
                while (number := self._signals.next()) is not None:
                    self._ranks.signal(number)
        except DistError:
            if not self.alone:
                self.alone = True
                self._asked.remember(signal.SIGTERM)
        return ended

    def tell(self, end: RankEnd) -> None:
        self._ends.add(asdict(replace(end, host=socket.gethostname())))

    def signal(self, number: int) -> None:
        self._ranks.signal(number)


def follow() -> NoReturn:
    """Start for our rank what the leader orders, until it says with which code to end. Raises: UserError."""
    end_with_parent(os.getppid())
    code = _follow()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take all libraries apart takes seconds


def _follow() -> int:
    store = PrefixStore("team", rendezvous.store())
    orders = _Series(store, "orders")
    number = 0
    try:
        while True:
            number += 1
            with Signals() as asked, Ranks() as ranks:
                follower = _Follower(ranks, store, number, asked)
                order = _next_order(orders, asked)
                if order is None:
                    follower.tell(RankEnd(rank_variables.rank(), TERMINATED))
                    return TERMINATED
                if not order.module:
                    store.add("dismissed", 1)
                    return order.code
                try:
                    order.start(ranks)
                except UserError as error:
                    print(f"error: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
                    follower.tell(RankEnd(rank_variables.rank(), MISTAKE, lost=str(error)))
                Watch(follower, asked, order.grace_s).follow()
    except DistError:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        rank = f"rank {rank_variables.rank()} on {socket.gethostname()}"
        print(f"{rank}: the chain that led it is gone from {address}", file=sys.stderr, flush=True)
        return 1


def _next_order(orders: _Series, asked: Signals) -> Order | None:
    """None if someone wants this process to end; SIGUSR1 is the leader's affair."""
    while (order := orders.next()) is None:
        if set(asked.take()) - {signal.SIGUSR1}:
            return None
        time.sleep(LISTENING_S)
    return Order(**order)


def _until(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def main() -> NoReturn:
    """What DeepSpeed's launcher starts as each rank, with the leader's address and port. Raises: UserError."""
    os.environ |= {"MASTER_ADDR": sys.argv[1], "MASTER_PORT": sys.argv[2], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank_variables.adopt(os.environ)
    follow()


if __name__ == "__main__":
    raise SystemExit(run_as_user(main))
