"""Hosts of a run: the file, the choice among them, how they are reached, what goes there, and where ranks meet."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from rlhf.config.options import RunOptions
from rlhf.distributed import addresses, rendezvous
from rlhf.errors import UserError
from rlhf.launch import hosts
from rlhf.launch.hosts import Deployment, Host, LaunchOptions
from tests.processes import until

ROOT = Path(__file__).parents[3]
ABC = (Host("a", (0, 1)), Host("b", (0, 1, 2)), Host("c", (0,)))


def chosen(**options: Any) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in hosts.choose(ABC, LaunchOptions(**options))}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hf"
    file.write_text("# ours\n\nworker-1 slots=4\n  10.0.0.2   slots=2  # the old one\n")
    found = hosts.open_deployment(LaunchOptions(hostfile=str(file)))
    assert found.hosts == (Host("worker-1", (0, 1, 2, 3)), Host("10.0.0.2", (0, 1)))
    assert found.processes == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\nb 2\n", ":2: got 'b 2', expected 'name slots=N'"),
        ("a slots=0\n", ":1: got 'a slots=0', expected 'name slots=N' with N above 0"),
        ("-oProxyCommand=x slots=1\n", ":1: got '-oProxyCommand=x slots=1'"),
        ("a;b slots=1\n", ":1: got 'a;b slots=1'"),
        ("a slots=1\na slots=2\n", ":2: a stands there twice"),
        ("# nobody\n", "names no host"),
    ],
)
def test_mistakes_in_a_hostfile(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "hf"
    file.write_text(text)
    assert said in refusal(lambda: hosts.read_hostfile(str(file)))


def test_no_hostfile() -> None:
    assert "cannot be read (No such file or directory)" in refusal(lambda: hosts.read_hostfile("no/file"))
    assert "got no --hostfile" in refusal(lambda: hosts.open_deployment(LaunchOptions()))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {"a": (0, 1), "b": (0, 1, 2), "c": (0,)}),
        ({"include": "c@b:2,0"}, {"b": (0, 2), "c": (0,)}),
        ({"exclude": "a@b:1"}, {"b": (0, 2), "c": (0,)}),
        ({"exclude": "a:0,1"}, {"b": (0, 1, 2), "c": (0,)}),
        ({"num_nodes": 2}, {"a": (0, 1), "b": (0, 1, 2)}),
        ({"exclude": "a", "num_nodes": 1}, {"b": (0, 1, 2)}),
    ],
)
def test_the_choice_among_hosts(options: dict[str, Any], left: dict[str, tuple[int, ...]]) -> None:
    assert chosen(**options) == left


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"include": "a", "exclude": "b"}, "got both"),
        ({"include": "d"}, "--include d: no host 'd'"),
        ({"include": "b:3"}, "b has slots 0 to 2"),
        ({"include": "b:x"}, "got 'b:x', expected host:0,2"),
        ({"exclude": "a@b@c"}, "leaves no host of a, b, c"),
        ({"num_nodes": 4}, "--num-nodes 4: there are 3 hosts: a, b, c"),
    ],
)
def test_a_choice_that_cannot_be(options: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: chosen(**options))


def test_how_hosts_are_reached() -> None:
    words = ["python", "-c", "print('a b; rm -rf $HOME')"]
    far = hosts.command_on("far.example", words, LaunchOptions(ssh_port=2222, rendezvous_timeout_s=9))
    assert far[:2] == ["ssh", "-T"] and far[-3:-1] == ["--", "far.example"]
    assert {"BatchMode=yes", "ConnectTimeout=9"} <= set(far) and far[far.index("-p") + 1] == "2222"
    # sshd gives the last word to a shell, which must take it apart into just these.
    assert shlex.split(far[-1]) == ["env", f"PYTHONPATH={ROOT}", *words]
    assert hosts.command_on("localhost", words, LaunchOptions()) == ["env", f"PYTHONPATH={ROOT}", *words]
    step = hosts.command_on("n1", words, LaunchOptions(remote_shell="srun"))
    assert step[0] == "srun" and "--nodelist=n1" in step and step[-3:] == words


def test_settings_travel_and_secrets_do_not() -> None:
    settings = {"HF_HOME": "x", "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}
    secret = ("HF_TOKEN", "HF_TOKEN_PATH", "NCCL_KEY", "HF_SECRET", "HF_PASSWORD", "DS_CREDENTIALS", "TORCH_api_key")
    own = {"HOME": "/h", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "WANDB_API_KEY": "k", "RANK": "3"}
    assert hosts.travelling(settings | dict.fromkeys(secret, "s") | own) == settings


# --- this machine's network


def test_addresses_and_interfaces() -> None:
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses.address_towards("no.such.host.invalid") is None
    assert addresses.is_here("localhost") and addresses.is_here("127.0.0.1") and not addresses.is_here("203.0.113.7")
    assert addresses.interface_of("127.0.0.1") in ("lo", "lo0") and addresses.interface_of("203.0.113.7") is None
    came_in = "10.0.0.1 5000 10.0.0.9 22"
    assert addresses.first_address(["no.such.host.invalid"], came_in) == "10.0.0.9"
    assert addresses.first_address([], "") is None


def test_a_port_that_is_taken_is_named_with_one_that_is_free() -> None:
    with addresses.listen("127.0.0.1", 0, "port") as taken:
        port = taken.getsockname()[1]
        said = refusal(lambda: addresses.listen("127.0.0.1", port, "--master-port"))
    assert said.startswith(f"--master-port {port}: is taken on {socket.gethostname()} (127.0.0.1); free now: ")
    assert "203.0.113.7:0: cannot listen" in refusal(lambda: addresses.listen("203.0.113.7", 0, "port"))


# --- where ranks meet


def meet(records: list[Any]) -> list[str | None]:
    """What each rank is told in the end; None in `records` is one that never comes."""
    store = HashStore()
    told: list[str | None] = [None] * len(records)

    def rank(number: int) -> None:
        ranks = rendezvous.Meeting(store, number, len(records))
        try:
            ranks.agree("here", records[number], 1.0, lambda said: rendezvous.differences(said, len(records)))
        except UserError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=rank, args=(n,)) for n, record in enumerate(records) if record is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


def record(host: str, **has: str) -> dict[str, Any]:
    return {"host": host, "has": {"torch": "2.10", "--seed": "0", "rlhf/training/run.py": "ab"} | has}


def test_ranks_that_agree() -> None:
    assert meet([record("a"), record("b"), record("b")]) == [None] * 3


def test_a_difference_is_told_to_every_rank() -> None:
    other = record(
        "b", **{"torch": "2.11", "--seed": "1", "rlhf/training/run.py": "cd", "my.py": "1", "peft": "2", "tyro": "3"}
    )
    told = meet([record("a"), record("b"), other])
    assert told[0] == told[1] == told[2]
    assert told[0] is not None and told[0].startswith(
        "rank 2 on b is not like rank 0 on a: torch 2.11, not 2.10; --seed 1, not 0; rlhf/training/run.py differs; "
        "my.py is there; 2 more; "
    )


def test_who_is_missing_is_listed_and_the_others_released() -> None:
    told = meet([record("a"), None, record("b"), None, None])
    assert told[0] == told[2] and told[1] is None
    assert told[0] is not None and "3 of 5 ranks did not come" in told[0]
    assert "rank 1, 3-4; there are those of a, b;" in told[0]


def test_rank_0_is_missing() -> None:
    told = meet([None, record("b")])
    assert told[1] == "rank 0 did not come within 1 s; start the first host too"


def test_what_must_agree(tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text("1")
    found = rendezvous.what_must_agree(RunOptions(output_dir=f"{reward}:score", seed=3))
    assert found["--seed"] == "3" and found["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert {"torch", "deepspeed", "rlhf/distributed/rendezvous.py", "step3_ppo/stage.py", "data/batches.py"} <= set(
        found
    )
    assert "platform" not in found  # kernels may differ
    reward.write_text("2")
    changed = rendezvous.what_must_agree(RunOptions(output_dir=f"{reward}:score", seed=3))
    assert {name for name in found if found[name] != changed[name]} == {str(reward)}


def test_a_directory_that_only_one_host_sees() -> None:
    said = {0: {"host": "a", "seen": True, "trouble": ""}, 1: {"host": "b", "seen": False, "trouble": ""}}
    told = rendezvous._unseen(said, Path("runs/x"))
    assert told is not None and told.startswith("--output-dir runs/x: b does not see what rank 0 on a writes there")
    said[1]["seen"] = True
    assert rendezvous._unseen(said, Path("runs/x")) is None
    said[0] |= {"seen": False, "trouble": "rank 0 cannot write to runs"}
    assert "rank 0 cannot write to runs" in str(rendezvous._unseen(said, Path("runs/x")))


def test_the_first_host_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (place | {rendezvous.TIMEOUT: "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    said = refusal(rendezvous.store)
    assert f"rank 1 on {socket.gethostname()}: nothing answers at 127.0.0.1:{port} within 1 s" in said


# --- the agent of a host


@pytest.fixture
def agent() -> Any:
    """An agent whose chain is this test, with a short patience for silence."""
    code = "import os, rlhf.launch.host_agent as n; n.SILENCE_S = 3; n.SHARED_S = 1; os._exit(n.Node().run())"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1) as it:
        yield it
        it.kill()


def plan(tmp_path: Path, body: str, **over: Any) -> dict[str, Any]:
    name = f"program_{tmp_path.name}_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(
        f"import os, pathlib, signal, sys, time\nhere = pathlib.Path({str(tmp_path)!r})\nexec(sys.argv[1])\n"
    )
    common = {"do": "prepare", "node": 0, "first": 4, "slots": [0], "directory": str(tmp_path), "file": str(tmp_path)}
    common |= {"environment": {"PYTHONPATH": str(tmp_path)}, "grace_s": 1, "meeting": None}
    return common | {"module": name, "argv": [body]} | over


def tell(agent: "subprocess.Popen[str]", **command: Any) -> None:
    assert agent.stdin is not None
    agent.stdin.write(json.dumps(command) + "\n")


def heard(agent: "subprocess.Popen[str]") -> dict[str, Any]:
    assert agent.stdout is not None
    event: dict[str, Any] = json.loads(agent.stdout.readline())
    return event


def test_an_agent_starts_ranks_and_tells_how_they_end(agent: "subprocess.Popen[str]", tmp_path: Path) -> None:
    tell(agent, **plan(tmp_path, "print(os.environ['RANK']); sys.exit(6)"))
    assert heard(agent) == {"ready": socket.gethostname(), "meeting": None}
    tell(agent, do="start", environment={"WORLD_SIZE": "9"})
    assert [heard(agent) for _ in range(3)] == [
        {"rank": 4, "out": "4\n"},
        {"ended": 4, "code": 6, "state": ""},
        {"done": True},
    ]
    assert agent.wait(60) == 0


@pytest.mark.parametrize("how", ["end of input", "silence"])
def test_ranks_end_when_the_chain_is_no_more(agent: "subprocess.Popen[str]", tmp_path: Path, how: str) -> None:
    """By SIGTERM first; one that does not obey is killed after the grace time."""
    body = "signal.signal(15, lambda *_: (here / 'asked').touch()); (here / 'ready').touch()\nwhile 1: time.sleep(0.1)"
    tell(agent, **plan(tmp_path, body))
    heard(agent)
    tell(agent, do="start", environment={})
    until((tmp_path / "ready").exists)
    if how == "end of input":
        assert agent.stdin is not None
        agent.stdin.close()
    assert heard(agent)["code"] == -signal.SIGKILL and (tmp_path / "asked").exists()
    assert agent.wait(60) == 0


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"directory": "/no/such/place"}, "/no/such/place: No such file or directory; the directory the run starts in"),
        ({"file": "/no/such/file"}, "/no/such/file does not show within 1 s; the output directory must be one"),
        ({"slots": list(range(4096))}, "4096 slots are asked for, there is no GPU and"),
        ({"meeting": {"address": "203.0.113.7", "port": None, "peers": []}}, "203.0.113.7:0: cannot listen"),
        ({"meeting": {"address": None, "port": None, "peers": ["no.such.host.invalid"]}}, "give --master-addr"),
    ],
)
def test_an_agent_refuses(agent: "subprocess.Popen[str]", tmp_path: Path, over: dict[str, Any], said: str) -> None:
    tell(agent, **plan(tmp_path, "", **over))
    assert said in heard(agent)["refused"]
    assert agent.wait(60) == 1


def test_a_deployment_of_one_machine_has_no_hosts() -> None:
    assert Deployment(2) == Deployment(2, (), LaunchOptions())
