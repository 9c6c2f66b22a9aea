"""Ranks on several hosts: the process of the chain is the leader, and a follower per rank runs the leader's orders.

torchrun, deepspeed, accelerate or srun starts the chain as many processes: rank 0 leads, the others follow. With
--hostfile the chain leads from outside, and DeepSpeed's launcher starts a follower for each rank. They communicate
through a store (torch's TCPStore), which the ranks of each stage use for their rendezvous too.

Whoever reaches the port can write into the store. So an order names no program and no directory: it names a stage's
file of options, and a follower runs it only if its own command line names the output directory in which that file is.
When the store is gone, or the leader gives no sign of life, a follower ends its rank, first by SIGTERM.
"""

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore, Store

from rlhf import console
from rlhf.distributed import addresses, rendezvous
from rlhf.errors import UserError, run_as_user
from rlhf.launch import rank_variables
from rlhf.launch.failure_summary import has_unsaved_steps
from rlhf.launch.hosts import Deployment, LaunchOptions, deepspeed_command
from rlhf.launch.launcher import OPTIONS_FILE, end_with_parent, hold_store, rank_environment
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
BEAT_S = 1.0
"""seconds between two signs of life of a leader"""
SILENCE_S = 60.0
"""seconds without a sign of life after which a leader is gone"""


@dataclass(frozen=True, slots=True)
class Work:
    """What a follower may run, from its own command line and never from the store.

    directory: in which its rank runs
    output_dir: of the chain; asked for with the first order, because a wrong command line is explained by the leader
    stages: the programs, as modules
    """

    directory: str
    output_dir: Callable[[], str]
    stages: Collection[str]

    def enter(self) -> None:
        """Raises: UserError if the directory is not on this host."""
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise UserError(f"{self.directory}: {error.strerror}; it must exist on every host") from None

    def stage_of(self, file: str) -> str:
        """The stage whose options are in `file`, a path as the leader writes it. Raises: UserError for a file that is
        not in the output directory or in one of the runs below it, or not of a stage."""
        path, home = Path(file), Path(self.output_dir())
        name = OPTIONS_FILE.fullmatch(path.name)
        below = path.parent.parent == home and path.parent.name != ".."
        if name is None or name[1] not in self.stages or not (path.parent == home or below):
            raise UserError(
                f"got an order to run the options {file!a}, expected a file of a stage in {home}, the output "
                "directory of this rank's own command line; start every host with the same command"
            )
        return name[1]


class _Series:
    """Values in a store in an order: one process writes them, every process can read them."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._count = store, name, 0

    def add(self, value: object) -> None:
        self._store.set(f"{self._name}/{self._count}", json.dumps(value))
        self._count += 1

    def next(self) -> Any:
        """The next value, or None if there is none yet. Raises: DistError if the store is gone."""
        value = _read(self._store, f"{self._name}/{self._count}")
        self._count += value is not None
        return value


def _read(store: Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


@dataclass(frozen=True, slots=True)
class Order:
    """An order to every rank: run the stage whose options are in `file`; without a file, end with `code`."""

    number: int
    file: str = ""
    grace_s: float = 0.0
    timeout_s: float = 0.0
    code: int = 0

    def start(self, ranks: Ranks, stage: str) -> None:
        """Start the rank whose variables this process has. Raises: UserError if the leader's file is not visible
        here."""
        if not rendezvous.wait_until(Path(self.file).exists, rendezvous.VISIBLE_S):
            raise UserError(
                f"{self.file} is not visible here after {rendezvous.VISIBLE_S:.0f} s; expected an output directory "
                "that all hosts share"
            )
        variables = {name: os.environ[name] for name in rank_variables.RANK_VARIABLES if name in os.environ}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", rendezvous.PART: str(int(self.number))}
        environment = rank_environment(int(variables.get("LOCAL_WORLD_SIZE", 1)), self.grace_s)
        command = [sys.executable, "-P", "-m", stage, "--config", self.file]
        environment |= {rendezvous.TIMEOUT: str(float(self.timeout_s))} | variables
        ranks.start(rank_variables.rank(), command, environment)


class Team:
    """The ranks of all hosts, led by this process; own: this process has a rank too. A Group."""

    def __init__(self, store: Store, size: int, own: bool, starter: "subprocess.Popen[bytes] | None" = None) -> None:
        self._store = PrefixStore("team", store)
        self._orders = _Series(self._store, "orders")
        self._number = self._kills = 0
        self._own, self._starter = own, starter
        self.size = size

    def run(self, stage: str, argv: Sequence[str], options: LaunchOptions) -> ExitStatus:
        """Run `python -m stage --config FILE` as every rank, to their end; supervisor.GroupWatch documents how all end.

        argv: --config and the stage's `options_file`
        """
        self._number, self._kills = self._number + 1, 0
        self._signals = _Series(self._store, f"{self._number}/signals")
        self._running, self._ended = set(range(self.size)), 0
        order = Order(self._number, argv[1], options.grace_s, options.rendezvous_timeout_s)
        with Signals() as signals, Ranks() as self._ranks:
            self._orders.add(asdict(order))
            if self._own:
                order.start(self._ranks, stage)
            unsaved = partial(has_unsaved_steps, Path(argv[1]).parent / stage)
            return GroupWatch(self, signals, options.grace_s, unsaved).wait()

    def running(self) -> list[int]:
        return sorted(self._running)

    def poll(self) -> list[RankExit]:
        host = socket.gethostname()
        exits = [replace(end, host=host) for end in self._ranks.poll()]
        started = self._starter is None or self._starter.poll() is None
        lost = "" if started else "the launcher that started it has ended"
        try:
            count = self._store.add(f"{self._number}/ended", 0)
            if count != self._ended:  # one read while nothing happens, not one for each rank
                self._ended = count
                ends = [_read(self._store, f"{self._number}/ends/{rank}") for rank in self.running()]
                exits += [RankExit(**fields) for fields in ends if fields is not None]
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
    def beating(self) -> Iterator[None]:
        """Inside, this process gives signs of life."""
        left = threading.Event()

        def beat() -> None:
            with contextlib.suppress(DistError):
                while not left.is_set():
                    self._store.add("alive", 1)
                    left.wait(BEAT_S)

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            left.set()


class _LeaderWatch:
    """A follower's watch of its leader, in its own time: neither counts while it is stopped."""

    def __init__(self, store: Store) -> None:
        self._store, self._beats, self._silence_s = store, 0, 0.0

    def poll(self) -> None:
        """To be called every STORE_POLL_S. Raises: DistError if the store or the leader is gone."""
        beats = self._store.add("alive", 0)
        self._silence_s = self._silence_s + STORE_POLL_S if beats == self._beats else 0.0
        self._beats = beats
        if self._silence_s > (SILENCE_S if beats else rendezvous.timeout_s()):
            raise DistError("no sign of life from the leader")


@contextlib.contextmanager
def lead() -> Iterator[Team]:
    """Lead the processes that another launcher has started; this is rank 0. They end with this process's exit code."""
    end_with_parent(os.getppid())
    team = Team(rendezvous.store(), rank_variables.world_size(), own=True)
    code = 1
    try:
        with team.beating():
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
def start(deployment: Deployment, output_dir: str, stages: Collection[str]) -> Iterator[Team]:
    """Lead the ranks of the deployment's hosts; DeepSpeed's launcher starts them. Raises: UserError."""
    options = deployment.options
    remote_hosts = [host for host in deployment.hosts if not addresses.is_this_host(host)]
    address = options.master_addr or next(filter(None, map(addresses.address_towards, remote_hosts)), None)
    if address is None and remote_hosts:
        raise UserError(
            "got hosts that this machine has no route to; set --master-addr to an address of this machine that they "
            "reach"
        )
    address = address or addresses.LOOPBACK
    listening = addresses.listen(address, options.master_port or 0, "--master-port")
    port = listening.getsockname()[1]
    store = rendezvous.part_of(hold_store(listening))
    with Ranks() as starters:
        command = deepspeed_command(options, address, port, follower_program(address, port, output_dir, stages))
        starter = starters.start(0, command, rank_environment(1), cwd=ROOT)
        team = Team(store, deployment.processes, own=False, starter=starter)
        try:
            with team.beating():
                yield team
        finally:
            team.dismiss(0)  # only the leader's exit code matters, and launchers print a long report about another code
            rendezvous.wait_until(lambda: starter.poll() is not None, CLOSING_S)


class _Follower:
    """One rank of this host: a Group for the GroupWatch of this process, which reports to the leader."""

    def __init__(self, ranks: Ranks, store: Store, number: int, signals: Signals, leader: _LeaderWatch) -> None:
        self._ranks, self._received, self._leader = ranks, signals, leader
        self._signals = _Series(store, f"{number}/signals")
        self._store, self._number = store, number
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
                self._leader.poll()
                while (number := self._signals.next()) is not None:
                    self._ranks.signal(number)
        except DistError:
            if not self.leader_is_gone:
                self.leader_is_gone = True
                self._received.remember(signal.SIGTERM)
        return exits

    def report(self, end: RankExit) -> None:
        fields = asdict(replace(end, host=socket.gethostname()))
        self._store.set(f"{self._number}/ends/{end.rank}", json.dumps(fields))
        self._store.add(f"{self._number}/ended", 1)

    def signal(self, number: int) -> None:
        self._ranks.signal(number)

    def has_unsaved_steps(self, order: Order) -> bool:
        """Whether to wait for a checkpoint: not if the leader is gone, whose store the ranks may need."""
        name = OPTIONS_FILE.fullmatch(Path(order.file).name)
        return not self.leader_is_gone and name is not None and has_unsaved_steps(Path(order.file).parent / name[1])


def follow(output_dir: Callable[[], str], stages: Collection[str]) -> NoReturn:
    """Run the leader's orders for the rank of this process, until the order to end. Raises: UserError.

    output_dir: as the command line of this process names it; stages: the programs that an order may start
    """
    _end_with(_follow(Work(os.getcwd(), output_dir, stages)))


def _end_with(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the clean-up of all libraries takes seconds


def _follow(work: Work) -> int:
    end_with_parent(os.getppid())
    store = PrefixStore("team", rendezvous.store())
    orders, leader = _Series(store, "orders"), _LeaderWatch(store)
    number = 0
    try:
        while True:
            number += 1
            with Signals() as signals, Ranks() as ranks:
                follower = _Follower(ranks, store, number, signals, leader)
                order = _next_order(orders, signals, leader)
                if order is None:
                    follower.report(RankExit(rank_variables.rank(), TERMINATED))
                    return TERMINATED
                if not order.file:
                    store.add("dismissed", 1)
                    if order.code:
                        time.sleep(CLOSING_S)  # rank 0 still says why: torchrun kills it at the first rank that fails
                    return order.code
                try:
                    work.enter()
                    order.start(ranks, work.stage_of(order.file))
                except UserError as error:
                    print(f"error: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
                    follower.report(RankExit(rank_variables.rank(), USER_ERROR, lost=str(error)))
                GroupWatch(follower, signals, order.grace_s, partial(follower.has_unsaved_steps, order)).wait()
    except DistError:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        rank = f"rank {rank_variables.rank()} on {socket.gethostname()}"
        print(f"{rank}: its leader at {address} has ended", file=sys.stderr, flush=True)
        return 1


def _next_order(orders: _Series, signals: Signals, leader: _LeaderWatch) -> Order | None:
    """The next order; None if a signal ends this process. SIGUSR1 is ignored: the leader handles it."""
    while (order := orders.next()) is None:
        if set(signals.take()) - {signal.SIGUSR1}:
            return None
        leader.poll()
        time.sleep(STORE_POLL_S)
    return Order(**order)


def follower_program(address: str, port: int, output_dir: str, stages: Collection[str]) -> list[str]:
    """`main` of this file with its arguments; the last one is a single word for every shell on the way."""
    work = json.dumps([os.getcwd(), output_dir, *stages]).encode()
    return [__file__, address, str(port), base64.urlsafe_b64encode(work).decode()]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The program that DeepSpeed's launcher starts as each rank, with the arguments of `follower_program`. Raises:
    UserError."""
    address, port, work = console.words(argv)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank_variables.adopt(os.environ)
    directory, output_dir, *stages = json.loads(base64.urlsafe_b64decode(work))
    _end_with(_follow(Work(directory, lambda: output_dir, stages)))


if __name__ == "__main__":
    raise SystemExit(run_as_user(main))
