"""The launcher across two hosts with an ssh between them: places, failures, signals, and no process left anywhere."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multi_node.world import ROOT, SSHD, World
from tests.processes import until

OURS = "import os, pathlib, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"


@pytest.fixture
def chain(hosts: World, tmp_path: Path) -> Callable[..., list[str]]:
    """`chain(body, *hostfile lines, option=value)`: the command, for alpha, that runs `body` on every slot."""
    name = f"program_{tmp_path.name}_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(
        f"{OURS}here = pathlib.Path({str(tmp_path)!r})\n"
        "def ready(): (here / f'ready-{rank}').write_text(os.uname().nodename)\nexec(sys.argv[1])\n"
    )

    def command(body: str, *lines: str, **options: object) -> list[str]:
        given = {"hostfile": hosts.hostfile(*lines), "rendezvous_timeout_s": 60.0, **options}
        code = (
            "import os, signal, sys; signal.signal(2, signal.default_int_handler)\n"
            "from rlhf import errors\nfrom rlhf.launch import hosts, launcher\n"
            f"os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
            "def main():\n"
            f"    where = hosts.open_deployment(hosts.LaunchOptions(**{given!r}))\n"
            f"    ended = launcher.run({name!r}, [{body!r}], where)\n"
            "    print(ended.cause, file=sys.stderr); return ended if ended >= 0 else 128 - ended\n"
            "sys.exit(errors.run_as_user(main))"
        )
        return [sys.executable, "-c", code]

    return command


def ready(folder: Path, count: int = 2) -> bool:
    return len(list(folder.glob("ready-*"))) == count


def nothing_left(hosts: World) -> None:
    until(lambda: not hosts.processes(), 40)


def test_every_rank_has_its_place_and_no_secret(hosts: World, chain: Callable[..., list[str]], tmp_path: Path) -> None:
    os.environ |= {"HF_TOKEN": "hf_secret", "NCCL_DEBUG": "WARN", "SOMETHING": "else", "HF_HUB_OFFLINE": "1"}
    body = "(here / f'env-{rank}').write_text(repr([os.uname().nodename, os.getcwd(), dict(os.environ)]))\nprint('I')"
    done = hosts.run(*chain(body, "alpha slots=1", "beta slots=2"))
    assert done.returncode == 0, done.stderr
    seen = [written(tmp_path / f"env-{rank}") for rank in range(3)]
    assert [name for name, *_ in seen] == ["alpha", "beta", "beta"]
    assert {place for _, place, _ in seen} == {str(ROOT)}
    for rank, (_, _, environment) in enumerate(seen):
        assert environment["RANK"] == str(rank) and environment["WORLD_SIZE"] == "3"
        assert environment["LOCAL_RANK"] == str(max(0, rank - 1)) and environment["NODE_RANK"] == str(min(1, rank))
        assert environment["MASTER_ADDR"] == hosts.alpha.address
        assert environment["NCCL_DEBUG"] == "WARN" and environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in seen[1][2] and "SOMETHING" not in seen[1][2]
    assert sorted(done.stdout.splitlines()) == ["I", "[rank 1 on beta] I", "[rank 2 on beta] I"]
    nothing_left(hosts)


def written(path: Path) -> tuple[str, str, dict[str, str]]:
    name, place, environment = ast.literal_eval(path.read_text())
    return name, place, environment


@pytest.mark.parametrize(
    ("body", "code", "cause"),
    [
        ("sys.exit(7) if rank else time.sleep(99)", 7, "rank 1 on beta: exit code 7"),
        ("time.sleep(99) if rank else sys.exit(75)", 75, "SIGTERM"),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(99)", 137, "rank 1 on beta: SIGKILL"),
    ],
)
def test_the_first_failure_ends_all_and_is_named(
    hosts: World, chain: Callable[..., list[str]], tmp_path: Path, body: str, code: int, cause: str
) -> None:
    done = hosts.run(*chain(body))
    assert done.returncode == code and cause in done.stderr
    nothing_left(hosts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both_hosts(hosts: World, chain: Callable[..., list[str]], tmp_path: Path, number: int) -> None:
    with hosts.start(chain("ready(); time.sleep(99)")) as process:
        until(lambda: ready(tmp_path), 60)
        process.send_signal(number)
        assert process.wait(90) == 128 + number
    nothing_left(hosts)


def test_usr1_is_passed_on_and_waited_for(hosts: World, chain: Callable[..., list[str]], tmp_path: Path) -> None:
    body = "def save(*_): time.sleep(3); sys.exit(75)\nsignal.signal(10, save); ready(); time.sleep(99); time.sleep(99)"
    with hosts.start(chain(body, grace_s=0.5)) as process:
        until(lambda: ready(tmp_path), 60)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(90) == 75 and process.stderr is not None and "SIGUSR1" in process.stderr.read()
    nothing_left(hosts)


def test_a_rank_that_does_not_answer_is_named_and_killed(
    hosts: World, chain: Callable[..., list[str]], tmp_path: Path
) -> None:
    body = "os.kill(os.getpid(), 19) if rank else (time.sleep(2), sys.exit(1))"
    done = hosts.run(*chain(body))
    assert done.returncode == 1
    assert done.stderr.strip() == "rank 0 on alpha: exit code 1; rank 1 on beta did not answer: it is stopped"
    nothing_left(hosts)


@pytest.mark.parametrize("whom", ["chain", "ssh"])
def test_nothing_outlives_a_chain_or_a_connection_that_was_killed(
    hosts: World, chain: Callable[..., list[str]], tmp_path: Path, whom: str
) -> None:
    if whom == "ssh" and SSHD is None:
        pytest.skip("no sshd is installed, and the stand-in of an ssh is no connection of its own")
    with hosts.start(chain("ready(); time.sleep(99)")) as process:
        until(lambda: ready(tmp_path), 60)
        if whom == "chain":
            process.kill()
        else:
            [connection] = children(process.pid, "beta")
            os.kill(connection, signal.SIGKILL)
            assert process.wait(90) == 1 and process.stderr is not None
            assert "rank 1 on beta: lost the host: ssh ended with exit code -9" in process.stderr.read()
    nothing_left(hosts)


def children(parent: int, word: str) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(parent), "-f", word], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def test_missing_hosts_are_listed_and_the_others_released(
    hosts: World, chain: Callable[..., list[str]], tmp_path: Path
) -> None:
    lines = ("alpha slots=1", "beta slots=1", "gamma slots=1")
    done = hosts.run(*chain("ready()", *lines))
    assert done.returncode == 2 and "error: 1 of 3 hosts are missing" in done.stderr
    assert (
        "gamma (ssh ended with exit code 255 (ssh:" in done.stderr
        and "beta (" not in done.stderr
        and "try: ssh gamma true" in done.stderr
    )
    assert not ready(tmp_path, 1)
    nothing_left(hosts)


def test_a_port_that_is_taken_is_named_with_another(
    hosts: World, chain: Callable[..., list[str]], tmp_path: Path
) -> None:
    code = f"import socket, time; s = socket.create_server(('{hosts.alpha.address}', 29511)); print(1, flush=True)"
    with hosts.start([sys.executable, "-c", f"{code}; time.sleep(99)"]) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        done = hosts.run(*chain("ready()", master_port=29511))
        holder.kill()
    assert done.returncode == 2 and not ready(tmp_path, 1)
    assert f"--master-port 29511: is taken on alpha ({hosts.alpha.address}); free now: " in done.stderr


def test_ranks_of_two_hosts_meet(hosts: World, chain: Callable[..., list[str]], tmp_path: Path) -> None:
    """By the interface between them, although each host takes its name for 127.0.1.1; nothing listens elsewhere."""
    body = (
        "import torch\nfrom rlhf.distributed import collectives as dist\n"
        "with dist.process_group(timeout_s=60):\n"
        "    total = dist.sum_over_ranks(torch.tensor([rank + 1.0])).item()\n"
        "    lines = [l.split() for l in open('/proc/net/tcp').readlines()[1:]]\n"
        "    mine = [os.readlink(p) for p in pathlib.Path('/proc/self/fd').iterdir() if p.is_socket()]\n"
        "    heard = [l[1] for l in lines if l[3] == '0A' and f'socket:[{l[9]}]' in mine]\n"
        "    (here / f'met-{rank}').write_text(repr((total, os.environ['GLOO_SOCKET_IFNAME'], heard)))\n"
        "    dist.barrier()\n"
        "os._exit(0)"
    )
    done = hosts.run(*chain(body))
    assert done.returncode == 0, done.stderr
    for rank, host in enumerate((hosts.alpha, hosts.beta)):
        total, interface, heard = ast.literal_eval((tmp_path / f"met-{rank}").read_text())
        assert (total, interface) == (3.0, "eth0")
        own = "".join(f"{int(part):02X}" for part in reversed(host.address.split(".")))
        assert heard and all(place.split(":")[0] == own for place in heard)
    nothing_left(hosts)
