"""Hosts of a run: the file and the choice among them, as DeepSpeed reads them, and the command that reaches them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher import runner

from rlhf.errors import UserError
from rlhf.launch import hosts
from rlhf.launch.hosts import LaunchOptions

ABC = "# ours\n\na slots=2\nb.example slots=3\n10.0.0.2   slots=1\n"


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers' programs are on PATH, but for srun."""
    for name in ("pdsh", "mpirun"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")


def deployment(tmp_path: Path, text: str, **options: Any) -> hosts.Deployment:
    (tmp_path / "hosts.txt").write_text(text)
    return hosts.open_deployment(LaunchOptions(hostfile=str(tmp_path / "hosts.txt"), **options))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "names", "processes"),
    [
        ({}, ("a", "b.example", "10.0.0.2"), 6),
        ({"include": "10.0.0.2@b.example:2,0"}, ("b.example", "10.0.0.2"), 3),
        ({"exclude": "a@b.example:1"}, ("b.example", "10.0.0.2"), 3),
        ({"num_nodes": 2}, ("a", "b.example"), 5),
    ],
)
def test_the_choice_among_hosts(
    tmp_path: Path, options: dict[str, Any], names: tuple[str, ...], processes: int
) -> None:
    """As DeepSpeed documents --include and --exclude."""
    chosen = deployment(tmp_path, ABC, **options)
    assert (chosen.hosts, chosen.processes) == (names, processes)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("a slots=2\nb 2\n", {}, "bad entry: b 2"),
        ("a slots=0\n", {}, "got no slot"),
        ("-oProxyCommand=x slots=1\n", {}, "got the host '-oProxyCommand=x'"),
        ("a;b slots=1\n", {}, "got the host 'a;b'"),
        ("a slots=1\na slots=2\n", {}, "multiple entries for a"),
        ("# nobody\n", {}, "Hostfile is empty"),
        (ABC, {"include": "a", "exclude": "b.example"}, "mutually exclusive"),
        (ABC, {"include": "d"}, "'d' not found"),
        (ABC, {"include": "a:3"}, "No slot '3'"),
        (ABC, {"include": "a", "num_nodes": 1}, "--num-nodes: got it with --include"),
        (ABC, {"num_nodes": 4}, "--num-nodes 4: there are 3 hosts: a, b.example, 10.0.0.2"),
        (ABC, {"launcher": "slurm"}, "--launcher slurm: no program srun on PATH"),
    ],
)
def test_a_choice_that_cannot_be(tmp_path: Path, text: str, options: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: deployment(tmp_path, text, **options))


def test_no_hostfile() -> None:
    assert "--hostfile no/file: no such file" in refusal(
        lambda: hosts.open_deployment(LaunchOptions(hostfile="no/file"))
    )


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "impi", "slurm"])
def test_the_command_is_one_that_deepspeed_reads(launcher: str, tmp_path: Path) -> None:
    options = LaunchOptions(hostfile="hosts.txt", launcher=launcher, include="a:0", launcher_args="-x 'a b'")
    words = hosts.deepspeed_command(options, "10.0.0.9", 2951, ["team.py", "10.0.0.9", "2951"])
    assert words[1:4] == ["-P", "-m", "deepspeed.launcher.runner"]
    read = runner.parse_args(words[4:])
    assert (read.hostfile, read.launcher) == (os.path.abspath("hosts.txt"), launcher)
    assert (read.include, read.launcher_args, read.force_multi, read.no_ssh_check) == ("a:0", "-x 'a b'", True, True)
    assert (read.master_addr, read.master_port) == ("10.0.0.9", 2951)
    assert (read.user_script, read.user_args) == ("team.py", ["10.0.0.9", "2951"])
