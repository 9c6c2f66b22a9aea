"""Processes that start together and end together: exit codes, signals, no orphan, one voice."""

import ast
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from rlhf.launch import launcher, supervisor
from rlhf.launch.supervisor import REQUEUE
from tests.support import forked
from tests.support.processes import alive, until

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
STAGE = "from rlhf.training.stage_process import *; from rlhf.config.options import RunOptions as O\n"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable program that does as its first argument says, in every rank."""
    name = f"program_{tmp_path.name}_{os.getpid()}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__main__.py").write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "rank = int(os.environ.get('RANK', 0))\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def ready(): (here / f'ready-{rank}').write_text(str(os.getpid()))\n"
        "def main(argv): exec(argv[0], globals()); return 0\n"
        "if __name__ == '__main__': main(sys.argv[1:])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return name


@pytest.mark.parametrize(("body", "code"), [("", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
def test_the_exit_code_is_the_stages(program: str, body: str, code: int) -> None:
    """Of one process; of two: test_what_ended_it_is_named."""
    assert launcher.run(program, [body], 1) == code


def test_a_process_alone_has_no_rank_and_two_have_their_own(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "5")  # left over from another launcher
    monkeypatch.delenv("OMP_NUM_THREADS")
    write = "(here / f'env-{rank}').write_text(repr(dict(os.environ)))"
    assert launcher.run(program, [write]) == 0
    alone = environment_in(tmp_path / "env-0")
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & set(alone)
    assert launcher.run(program, [write], 2) == 0
    first, second = (environment_in(tmp_path / f"env-{rank}") for rank in (0, 1))
    assert [first[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "2"]
    assert [second[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["1", "1", "2"]
    assert first["MASTER_ADDR"] == "127.0.0.1" and first["MASTER_PORT"] == second["MASTER_PORT"]
    assert int(first["OMP_NUM_THREADS"]) == max(1, launcher.cores() // 2)
    assert str(ROOT) in first["PYTHONPATH"].split(os.pathsep)


def environment_in(path: Path) -> dict[str, str]:
    environment: dict[str, str] = ast.literal_eval(path.read_text())
    return environment


def test_ranks_meet_and_listen_to_this_machine_only(program: str, tmp_path: Path) -> None:
    body = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([rank + 1.0]); dist.all_reduce(total)\n"
        "(here / f'sum-{rank}').write_text(str(total.item()))\n"
        "port = f':{int(os.environ[\"MASTER_PORT\"]):04X} '\n"
        "lines = [l for f in ('tcp', 'tcp6') if (t := pathlib.Path('/proc/net', f)).exists() for l in t.open()]\n"
        "(here / f'listen-{rank}').write_text(''.join(l for l in lines if port in l and ' 0A ' in l))\n"
        "dist.barrier(); dist.destroy_process_group()"
    )
    assert launcher.run(program, [body], 2) == 0
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in (0, 1)] == ["3.0", "3.0"]
    listening = (tmp_path / "listen-0").read_text().splitlines()
    assert all(" 0100007F:" in line for line in listening) and (listening or sys.platform != "linux")


@LINUX
def test_what_a_stage_leaves_running_is_ended_too(program: str) -> None:
    body = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', '{program}'])"
    assert launcher.run(program, [body]) == 0
    until(lambda: not alive(program))


@contextlib.contextmanager
def launched(program: str, body: str, processes: int, tmp_path: Path, grace_s: float = 30.0) -> Iterator[BaseProcess]:
    """A process of its own that runs `program`, once every rank is ready; killed at the end if it is still there."""
    code = "import signal, sys; signal.signal(1, signal.SIG_DFL); signal.signal(2, signal.default_int_handler)\n"
    code += "from rlhf.launch import launcher\n"
    code += "from rlhf.launch.hosts import Deployment, LaunchOptions\n"
    code += f"where = Deployment({processes}, options=LaunchOptions(grace_s={grace_s}))\n"
    code += f"sys.exit(launcher.run({program!r}, [{body!r}], where) % 256)"
    process = forked.process(("-c", code), os.environ, tmp_path / "launched", ROOT)
    process.start()
    try:
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(processes)))
        yield process
    finally:
        process.kill()
        process.join()


def send(process: BaseProcess, number: int) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def code_of(process: BaseProcess) -> int | None:
    process.join(60)
    return process.exitcode


@LINUX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_every_process(program: str, tmp_path: Path, number: int, processes: int) -> None:
    nested = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', '{program}']); "
    with launched(program, nested + "ready(); time.sleep(99)", processes, tmp_path) as process:
        until(lambda: len(alive(program)) >= 2 * processes)
        send(process, number)
        assert code_of(process) == (-number) % 256
    until(lambda: not alive(program))


@LINUX
def test_a_second_signal_kills(program: str, tmp_path: Path) -> None:
    stubborn = "signal.signal(15, lambda *_: (here / 'asked').write_text('')); ready()\nwhile 1: time.sleep(0.1)"
    with launched(program, stubborn, 1, tmp_path) as process:
        send(process, signal.SIGTERM)
        until((tmp_path / "asked").exists)
        assert process.is_alive()
        send(process, signal.SIGTERM)
        assert code_of(process) == (-signal.SIGTERM) % 256
    until(lambda: not alive(program))


@LINUX
@pytest.mark.parametrize(
    ("handler", "code"),
    [
        ("sys.exit(143)", 256 - signal.SIGTERM),  # it has saved
        ("sys.exit(1)", 1),  # it failed to
        ("time.sleep(99)", 256 - signal.SIGKILL),  # it takes longer than it may
    ],
)
def test_the_code_after_a_signal_tells_whether_the_stage_ended_in_order(
    program: str, tmp_path: Path, handler: str, code: int
) -> None:
    body = f"signal.signal(15, lambda *_: {handler}); ready(); time.sleep(99)"
    with launched(program, body, 1, tmp_path, grace_s=2.0) as process:
        send(process, signal.SIGTERM)
        assert code_of(process) == code
    until(lambda: not alive(program))


@LINUX
@pytest.mark.parametrize("handler", ["signal.signal(10, lambda *_: (time.sleep(1), sys.exit(75)))", "pass"])
def test_usr1_is_passed_on_and_waited_for(program: str, tmp_path: Path, handler: str) -> None:
    """Longer than the grace time; a rank that knows no handler yet has nothing to save."""
    with launched(program, f"{handler}; ready(); time.sleep(99)", 2, tmp_path, grace_s=0.3) as process:
        send(process, signal.SIGUSR1)
        assert code_of(process) == REQUEUE
    until(lambda: not alive(program))


def test_one_that_ends_well_although_asked_to_be_started_again(program: str, tmp_path: Path) -> None:
    with launched(
        program, "signal.signal(10, lambda *_: sys.exit(0)); ready(); time.sleep(99)", 1, tmp_path
    ) as process:
        send(process, signal.SIGUSR1)
        assert code_of(process) == REQUEUE, "the next stage must not begin"


@pytest.mark.parametrize(
    ("body", "code", "cause"),
    [
        ("sys.exit(7) if rank else time.sleep(99)", 7, "rank 1: exit code 7"),
        ("os.kill(os.getpid(), 9) if rank == 0 else time.sleep(99)", -9, "rank 0: SIGKILL (often: the machine is out"),
        (
            "os.kill(os.getpid(), 19) if rank else (time.sleep(1), sys.exit(1))",
            1,
            "rank 0: exit code 1; rank 1 did not answer: it is stopped",
        ),
        (
            "signal.signal(15, lambda *_: 0); time.sleep(1); sys.exit(1) if rank else time.sleep(99)",
            1,
            "rank 1: exit code 1; rank 0 did not answer: stopped or hung",
        ),
        ("time.sleep(99) if rank else sys.exit(143)", 143, "SIGTERM"),
        ("", 0, ""),
    ],
)
def test_what_ended_it_is_named(
    program: str, body: str, code: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CLOSING_S", 1.0)
    ended = launcher.run(program, [body], 2)
    assert ended == code and ended.cause.startswith(cause)
    if sys.platform == "linux":
        assert not alive(program)


@LINUX
def test_a_stage_that_does_not_hear_the_end_of_its_launcher_is_killed(program: str, tmp_path: Path) -> None:
    stage = STAGE
    stage += "def run(_):\n    signal.signal(15, lambda *_: 0); ready()\n    while 1: time.sleep(0.1)\n"
    stage += f"stage_main([], Declaration('x', '', {{}}, ()), lambda _: O, run)  # {program}"
    with launched(program, stage, 1, tmp_path, grace_s=1.0) as process:
        process.kill()
    until(lambda: not alive(program))


@pytest.mark.faults
def test_two_ranks_end_well_every_time(program: str) -> None:
    body = "from rlhf.distributed.collectives import barrier, process_group\n"
    body += "from rlhf.training.stage_process import end_well\n"
    body += "with process_group(60): barrier()\nend_well()"
    assert [int(launcher.run(program, [body], 2)) for _ in range(10)] == [0] * 10


def test_nothing_of_the_current_directory_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would look for every module there first; an empty part of PYTHONPATH means it too."""
    (tmp_path / "data").mkdir()
    for name in ("yaml.py", "torch.py", "step1_sft.py", "sitecustomize.py", "data/__init__.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'absent'}:")
    assert launcher.run("step1_sft", ["--help"]) == 0
    assert not (tmp_path / "ran").exists()
