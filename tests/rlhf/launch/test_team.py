"""Ranks with a follower each, led from here: exit codes, signals, who is named, and no process left."""

import ast
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import DistError, HashStore, TCPStore

from rlhf.distributed import rendezvous
from rlhf.launch import launcher, team
from rlhf.launch.hosts import LaunchOptions
from tests.support import forked
from tests.support.processes import alive, until

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
HOST = socket.gethostname()
LOOPBACK = "127.0.0.1"
CODE = 5
PROGRAM = (
    "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    "def ready(): pathlib.Path(f'ready-{rank}').touch()\n"
    "def wait(): ready(); [time.sleep(0.1) for _ in iter(lambda: pathlib.Path(f'ready-{1 - rank}').exists(), True)]\n"
    "exec(pathlib.Path(sys.argv[2]).read_text())\n"
)


def follower(rank: int, port: int, folder: Path, program: str) -> BaseProcess:
    """What DeepSpeed's launcher starts for a rank of a chain in this directory, with its variables; it writes into
    `folder`."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    paths = {"PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}", "PYTHONSAFEPATH": "1"}
    command = team.follower_program(LOOPBACK, port, ".", [program])
    process = forked.process(command, os.environ | own | paths, folder / f"follower-{rank}", Path.cwd())
    process.start()
    return process


def code_of(process: BaseProcess) -> int | None:
    process.join(90)
    return process.exitcode


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an importable program that does in every rank what its file says."""
    folder = tmp_path_factory.mktemp("team")
    name = f"program_{folder.name}_{os.getpid()}"
    (folder / f"{name}.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder))
        yield name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the team's chain."""
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def store() -> TCPStore:
    """Open to every program of this machine, as every store is."""
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def led(program: str, home: Path, store: TCPStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[team.Team]:
    """A team whose two followers stay for all tests, as they do for all stages of a chain."""
    folder = tmp_path_factory.mktemp("followers")
    with contextlib.chdir(home):
        followers = [follower(rank, store.port, folder, program) for rank in (0, 1)]
    try:
        led = team.Team(rendezvous.part_of(store), 2, own=False)
        with led.beating():
            yield led
        led.dismiss(CODE)
        assert [code_of(process) for process in followers] == [CODE, CODE]
    finally:
        for process in followers:
            process.kill()


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the team's chain, empty."""
    shutil.rmtree(home)
    home.mkdir()
    monkeypatch.chdir(home)
    return home


def words(program: str, body: str) -> list[str]:
    """The arguments of a stage whose file says `body`."""
    file = launcher.options_file(".", program)
    file.write_text(body)
    return ["--config", str(file)]


OPTIONS = LaunchOptions(grace_s=30.0)


def test_every_rank_knows_its_number_and_each_stage_has_its_part_of_the_store(
    led: team.Team, program: str, here: Path
) -> None:
    write = "pathlib.Path(f'env-STAGE-{rank}').write_text(repr([os.getcwd(), dict(os.environ)]))"
    parts = set()
    for stage in ("1", "2"):
        assert (
            led.run(program, words(program, write.replace("STAGE", stage)), LaunchOptions(rendezvous_timeout_s=7)) == 0
        )
        for rank in (0, 1):
            folder, environment = ast.literal_eval((here / f"env-{stage}-{rank}").read_text())
            assert folder == str(here)
            numbers = [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
            assert numbers == [str(rank), str(rank), "2", "2"]
            assert environment["MASTER_ADDR"] == LOOPBACK and environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            assert float(environment[rendezvous.TIMEOUT]) == 7
            parts.add(environment[rendezvous.PART])
    assert len(parts) == 2


@pytest.mark.parametrize(
    ("body", "code", "cause", "crashed"),
    [
        ("", 0, "", False),
        ("sys.exit(7) if rank else time.sleep(99)", 7, f"rank 1 on {HOST}: exit code 7", True),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(99)", -9, f"rank 1 on {HOST}: SIGKILL (often", True),
        ("time.sleep(99) if rank else sys.exit(143)", 143, "SIGTERM", False),
        ("sys.exit(2) if rank else time.sleep(99)", 2, f"rank 1 on {HOST}: exit code 2", False),
        ("sys.exit(3) if rank else time.sleep(99)", 3, f"rank 1 on {HOST}: exit code 3", False),
        (
            "ready(); os.kill(os.getpid(), 19) if rank else (wait(), sys.exit(1))",
            1,
            f"rank 0 on {HOST}: exit code 1; rank 1 on {HOST} did not answer: it is stopped",
            True,
        ),
    ],
)
def test_the_first_failure_ends_all_and_is_named(
    led: team.Team, program: str, here: Path, body: str, code: int, cause: str, crashed: bool
) -> None:
    ended = led.run(program, words(program, body), OPTIONS)
    assert (int(ended), ended.crashed) == (code, crashed) and ended.cause.startswith(cause), ended.cause
    until(lambda: not alive(program))


@pytest.mark.parametrize(
    ("number", "handler", "grace_s", "code"),
    [
        (signal.SIGTERM, "sys.exit(143)", 30.0, -signal.SIGTERM),
        (signal.SIGTERM, "0", 1.0, -signal.SIGKILL),  # it does not answer
        (signal.SIGUSR1, "(time.sleep(2), sys.exit(75))", 1.0, 75),  # longer than the grace
    ],
)
def test_a_signal_to_the_leader_reaches_every_rank(
    led: team.Team, program: str, here: Path, number: int, handler: str, grace_s: float, code: int
) -> None:
    body = (
        f"signal.signal({int(number)}, lambda *_: {handler}); wait(); rank or os.kill({os.getpid()}, {int(number)})\n"
        "while 1: time.sleep(0.1)"
    )
    ended = led.run(program, words(program, body), LaunchOptions(grace_s=grace_s))
    assert ended == code and not ended.crashed and signal.Signals(number).name in ended.cause
    until(lambda: not alive(program))


def test_a_host_without_the_directory_is_named(led: team.Team, program: str, here: Path) -> None:
    argv = words(program, "")
    moved = here.rename(here.with_name("elsewhere"))
    try:
        ended = led.run(program, argv, OPTIONS)
    finally:
        moved.rename(here)
    assert ended == 2 and f"{here}: No such file or directory; it must exist" in ended.cause


def test_a_number_without_an_order_stops_nobody(led: team.Team, store: TCPStore, program: str, here: Path) -> None:
    rendezvous.part_of(store).add("team/orders/count", 1)
    assert led.run(program, words(program, "sys.exit(7)"), OPTIONS) == 7


@pytest.mark.parametrize(
    "order",
    [
        {"file": "../strange/.PROGRAM-1.yaml"},
        {"file": "./../.PROGRAM-1.yaml"},
        {"file": ".evil-1.yaml"},
        {"module": "evil", "argv": [], "directory": "."},
    ],
)
def test_a_strangers_order_runs_nothing(program: str, here: Path, tmp_path: Path, order: dict[str, str]) -> None:
    """Who reaches the port can write orders: a program of theirs, or a stage with options of theirs."""
    strange = here.with_name("strange")
    strange.mkdir(exist_ok=True)
    harm = f"__import__('pathlib').Path({str(tmp_path / 'harm')!r}).touch()"
    for path in (strange / f".{program}-1.yaml", here.parent / f".{program}-1.yaml", here / ".evil-1.yaml"):
        path.write_text(harm)
    (Path(os.environ["PYTHONPATH"].split(":")[0]) / "evil.py").write_text(harm)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    stranger = rendezvous.part_of(TCPStore(LOOPBACK, store.port, is_master=False))
    stranger.set("team/orders/0", json.dumps({"number": 1, "grace_s": 30.0} | order).replace("PROGRAM", program))
    process = follower(0, store.port, tmp_path, program)
    try:
        until(lambda: stranger.check(["team/1/ends/0"]) or not process.is_alive())
    finally:
        process.kill()
        process.join()
    assert not (tmp_path / "harm").exists()
    if "file" in order:
        _, error = forked.text(tmp_path / "follower-0")
        assert "got an order to run the options" in error and "expected a file of a stage in ." in error


def test_a_leader_that_gives_no_sign_of_life_is_gone() -> None:
    store = HashStore()
    watch = team._LeaderWatch(store)
    polls = int(team.SILENCE_S / team.STORE_POLL_S)
    for _ in range(2):
        store.add("alive", 1)
        for _ in range(polls + 1):
            watch.poll()
    with pytest.raises(DistError):
        watch.poll()


def test_a_leader_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "BEAT_S", 0.01)
    store = HashStore()
    with team.Team(store, 2, own=False).beating():
        until(lambda: store.add("team/alive", 0) > 2)


@contextlib.contextmanager
def chain(program: str, port: int, body: str, folder: Path) -> Iterator[BaseProcess]:
    """A leader of its own process, which holds the store; it writes into `folder`."""
    argv = words(program, body)
    code = (
        "from torch.distributed import TCPStore\nfrom rlhf.distributed import rendezvous\n"
        "from rlhf.launch import team\nfrom rlhf.launch.hosts import LaunchOptions\n"
        f"store = TCPStore('{LOOPBACK}', {port}, is_master=True, wait_for_workers=False)\n"
        f"led = team.Team(rendezvous.part_of(store), 2, own=False)\n"
        f"ended = led.run({program!r}, {argv!r}, LaunchOptions(grace_s=2.0))\n"
        "print(int(ended), ended.cause)"
    )
    process = forked.process(("-c", code), os.environ, folder / "leader", folder)
    process.start()
    yield process
    process.kill()
    process.join()


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("killed", ["leader", "follower"])
def test_nothing_outlives_a_leader_or_a_follower_that_was_killed(program: str, here: Path, killed: str) -> None:
    """The rank of a follower that was killed ends, and the other rank loses its peer."""
    body = (
        "from rlhf.training.stage_process import *; from rlhf.config.options import RunOptions as O\n"
        "def run(_):\n    wait()\n    while rank or not pathlib.Path('lost').exists(): time.sleep(1)\n    sys.exit(1)\n"
        f"stage_main([], Declaration('x', '', {{}}, ()), lambda _: O, run)  # {program}"
    )
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    with chain(program, port, body, here) as leader:
        followers = [follower(rank, port, here, program) for rank in (0, 1)]
        try:
            until(lambda: all((here / f"ready-{rank}").exists() for rank in (0, 1)))
            (leader if killed == "leader" else followers[1]).kill()
            (here / "lost").touch()
            assert code_of(followers[0]) == 1
            if killed == "leader":
                _, error = forked.text(here / "follower-0")
                assert f"rank 0 on {HOST}: its leader at {LOOPBACK}:{port} has ended" in error
            else:
                assert code_of(leader) == 0
                cause, _ = forked.text(here / "leader")
                assert cause.startswith(f"1 rank 0 on {HOST}: exit code 1; rank 1 did not answer: its h")
        finally:
            for process in followers:
                process.kill()
    until(lambda: not alive(program))


def test_a_launcher_that_ends_early_is_said(program: str, here: Path) -> None:
    """pdsh has reached nobody, say."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with subprocess.Popen(["false"]) as starter:
        starter.wait()
        ended = team.Team(store, 2, own=False, starter=starter).run(program, words(program, ""), OPTIONS)
    assert ended == 1 and not ended.crashed
    assert ended.cause == "rank 0: the launcher that started it has ended"


def test_rank_0_of_another_launcher_leads_and_the_others_end_with_its_code(
    program: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under srun and deepspeed, where rank 0 holds the store."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (own | {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(team, "end_with_parent", lambda _: None)  # pytest itself shall not end so
    other = follower(1, port, here, program)
    with pytest.raises(SystemExit), team.lead() as led:
        assert led.run(program, words(program, "wait()"), OPTIONS) == 0
        assert led.run(program, words(program, "sys.exit(7 * rank)"), OPTIONS) == 7
        raise SystemExit(75)
    assert code_of(other) == 75


def test_a_follower_lets_its_leader_say_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun kills all processes as soon as one has failed, and the leader prints its error last."""
    waits: list[float] = []
    monkeypatch.setattr(team.time, "sleep", waits.append)
    monkeypatch.setattr(team, "end_with_parent", lambda _: None)
    monkeypatch.setattr(team.rendezvous, "store", HashStore)
    for code in (0, CODE):
        monkeypatch.setattr(team, "_next_order", lambda *_, code=code: team.Order(1, code=code))
        assert team._follow(team.Work("here", lambda: "out", [])) == code
        assert waits == [team.CLOSING_S] * (code == CODE)
