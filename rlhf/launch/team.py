"""Ranks on several hosts: the process of the chain is the leader, and a follower per rank runs the leader's orders.

torchrun, deepspeed, accelerate or srun starts the chain as many processes: rank 0 leads, the others follow. With
--hostfile the chain leads from outside, and DeepSpeed's launcher starts a follower for each rank. They communicate
through a store (torch's TCPStore), which the ranks of each stage use for their rendezvous too. When the store is gone,
the leader is gone, and a follower ends its rank, first by SIGTERM.
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
from rlhf.launch.supervisor import (
    CLOSING_S,
    TERMINATED,
    USER_ERROR,
    ExitStatus,
    GroupWatch,
    RankExit,
    Ranks,
    Signals,
)
from rlhf.shipped import ROOT

STORE_POLL_S = 0.25
"""seconds between a follower's reads of the store"""
VISIBLE_S = 30.0
"""seconds within which a file of the leader must be visible on every other host"""


class _Series:
    """Values in a store: every process may add one, and every process reads all of them in order."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._read = store, name, 0

    def add(self, value: Any) -> None:
        number = self._store.add(f"{self._name}/count", 1) - 1
        self._store.set(f"{self._name}/{number}", json.dumps(value))

    def next(self) -> Any:
        """The next value, or None if there is none yet. Raises: DistError if the store is gone."""
        key = f"{self._name}/{self._read}"
        if not self._store.check([key]):
            return None
        self._read += 1
        return json.loads(self._store.get(key))


@dataclass(frozen=True, slots=True)
class Order:
    """An order to every rank: run `python -m module *argv` in `directory`; without a module, end with `code`."""

    number: int
    module: str = ""
    argv: Sequence[str] = ()
    directory: str = ""
    grace_s: float = 0.0
    timeout_s: float = 0.0
    code: int = 0

    def start(self, ranks: Ranks) -> None:
        """Start the rank whose variables this process has. Raises: UserError if the leader's files are not visible
        here."""
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise UserError(f"{self.directory}: {error.strerror}; it must exist on every host") from None
        shared = self.argv[self.argv.index("--config") + 1] if "--config" in self.argv else "."
        if not rendezvous.wait_until(Path(shared).exists, VISIBLE_S):
            raise UserError(
                f"{shared} is not visible here after {VISIBLE_S:.0f} s; expected an output directory that all hosts "
                "share"
            )
        variables = {name: os.environ[name] for name in rank_variables.RANK_VARIABLES if name in os.environ}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", rendezvous.PART: str(self.number)}
        environment = rank_environment(int(variables.get("LOCAL_WORLD_SIZE", 1)), self.grace_s)
        command = [sys.executable, "-P", "-m", self.module, *self.argv]
        environment |= {rendezvous.TIMEOUT: str(self.timeout_s)} | variables
        ranks.start(rank_variables.rank(), command, environment)


class Team:
    """The ranks of all hosts, led by this process; own: this process has a rank too. A Group."""

    def __init__(self, store: Store, size: int, own: bool, starter: "subprocess.Popen[bytes] | None" = None) -> None:
        self._store = PrefixStore("team", store)
        self._orders = _Series(self._store, "orders")
        self._number = self._kills = 0
        self._own, self._starter = own, starter
        self.size = size

    def run(self, module: str, argv: Sequence[str], options: LaunchOptions) -> ExitStatus:
        """Run `python -m module` as every rank, to their end; supervisor.GroupWatch documents how all end."""
        self._number, self._kills = self._number + 1, 0
        self._signals = _Series(self._store, f"{self._number}/signals")
        self._ends = _Series(self._store, f"{self._number}/ends")
        self._running = set(range(self.size))
        order = Order(self._number, module, argv, os.getcwd(), options.grace_s, options.rendezvous_timeout_s)
        with Signals() as signals, Ranks() as self._ranks:
            self._orders.add(asdict(order))
            if self._own:
                order.start(self._ranks)
            return GroupWatch(self, signals, options.grace_s).wait()

    def running(self) -> list[int]:
        return sorted(self._running)

    def poll(self) -> list[RankExit]:
        host = socket.gethostname()
        exits = [replace(end, host=host) for end in self._ranks.poll()]
        started = self._starter is None or self._starter.poll() is None
        lost = "" if started else "the launcher that started it has ended"
        try:
            while (fields := self._ends.next()) is not None:
                exits.append(RankExit(**fields))
        except DistError:
            lost = "the store of the launcher is gone"
        if self._kills > 1:
            lost = lost or "its host did not answer"
        exits = [end for end in exits if end.rank in self._running]
        self._running -= {end.rank for end in exits}
        if lost:
            exits += [RankExit(rank, 1, lost=lost) for rank in self.running() if rank not in self._ranks.running()]
            self._running &= set(self._ranks.running())
        return exits

    def signal(self, number: int) -> None:
        self._kills += number == signal.SIGKILL
        self._ranks.signal(number)
        with contextlib.suppress(DistError):
            self._signals.add(int(number))

    def dismiss(self, code: int) -> None:
        """Order the followers to end with `code`, and wait until they have read the order."""
        followers = self.size - self._own
        with contextlib.suppress(DistError):
            self._orders.add(asdict(Order(self._number + 1, code=code)))
            rendezvous.wait_until(lambda: self._store.add("dismissed", 0) >= followers, CLOSING_S)


@contextlib.contextmanager
def lead() -> Iterator[Team]:
    """Lead the processes that another launcher has started; this is rank 0. They end with this process's exit code."""
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
        code = USER_ERROR
        raise
    finally:
        team.dismiss(code)


@contextlib.contextmanager
def start(deployment: Deployment) -> Iterator[Team]:
    """Lead the ranks of the deployment's hosts; DeepSpeed's launcher starts them. Raises: UserError."""
    options = deployment.options
    remote_hosts = [host for host in deployment.hosts if not addresses.is_this_host(host)]
    address = options.master_addr or (addresses.first_address(remote_hosts) if remote_hosts else addresses.LOOPBACK)
    if address is None:
        raise UserError(
            "got hosts that this machine has no route to; set --master-addr to an address of this machine that they "
            "reach"
        )
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
            team.dismiss(0)  # only the leader's exit code matters, and launchers print a long report about another code
            rendezvous.wait_until(lambda: starter.poll() is not None, CLOSING_S)


class _Follower:
    """One rank of this host: a Group for the GroupWatch of this process, which reports to the leader."""

    def __init__(self, ranks: Ranks, store: Store, number: int, signals: Signals) -> None:
        self._ranks, self._received = ranks, signals
        self._signals = _Series(store, f"{number}/signals")
        self._ends = _Series(store, f"{number}/ends")
        self._next = 0.0
        self.leader_is_gone = False

    def running(self) -> list[int]:
        return self._ranks.running()

    def poll(self) -> list[RankExit]:
        exits = self._ranks.poll()
        try:
            for end in exits:
                self.report(end)
            if time.monotonic() > self._next:
                self._next = time.monotonic() + STORE_POLL_S
                while (number := self._signals.next()) is not None:
                    self._ranks.signal(number)
        except DistError:
            if not self.leader_is_gone:
                self.leader_is_gone = True
                self._received.remember(signal.SIGTERM)
        return exits

    def report(self, end: RankExit) -> None:
        self._ends.add(asdict(replace(end, host=socket.gethostname())))

    def signal(self, number: int) -> None:
        self._ranks.signal(number)


def follow() -> NoReturn:
    """Run the leader's orders for the rank of this process, until the order to end. Raises: UserError."""
    end_with_parent(os.getppid())
    code = _follow()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the clean-up of all libraries takes seconds


def _follow() -> int:
    store = PrefixStore("team", rendezvous.store())
    orders = _Series(store, "orders")
    number = 0
    try:
        while True:
            number += 1
            with Signals() as signals, Ranks() as ranks:
                follower = _Follower(ranks, store, number, signals)
                order = _next_order(orders, signals)
                if order is None:
                    follower.report(RankExit(rank_variables.rank(), TERMINATED))
                    return TERMINATED
                if not order.module:
                    store.add("dismissed", 1)
                    return order.code
                try:
                    order.start(ranks)
                except UserError as error:
                    print(f"error: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
                    follower.report(RankExit(rank_variables.rank(), USER_ERROR, lost=str(error)))
                GroupWatch(follower, signals, order.grace_s).wait()
    except DistError:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        rank = f"rank {rank_variables.rank()} on {socket.gethostname()}"
        print(f"{rank}: its leader at {address} has ended", file=sys.stderr, flush=True)
        return 1


def _next_order(orders: _Series, signals: Signals) -> Order | None:
    """The next order; None if a signal ends this process. SIGUSR1 is ignored: the leader handles it."""
    while (order := orders.next()) is None:
        if set(signals.take()) - {signal.SIGUSR1}:
            return None
        time.sleep(STORE_POLL_S)
    return Order(**order)


def main() -> NoReturn:
    """The program that DeepSpeed's launcher starts as each rank, with the leader's address and port. Raises:
    UserError."""
    os.environ |= {"MASTER_ADDR": sys.argv[1], "MASTER_PORT": sys.argv[2], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank_variables.adopt(os.environ)
    follow()


if __name__ == "__main__":
    raise SystemExit(run_as_user(main))
