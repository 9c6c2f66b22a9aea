"""Hosts of a run: the file and the choice among them, as DeepSpeed reads them, and the command that reaches them."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher import runner

from rlhf.launch import hosts, launcher
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
    return hosts.open_deployment(LaunchOptions(hostfile=str(tmp_path / "hosts.txt"), **options), most=4)


@pytest.mark.parametrize(
    ("options", "names", "processes"),
    [
        ({}, ("a", "b.example", "10.0.0.2"), 6),
        ({"include": "10.0.0.2@b.example:2,0"}, ("b.example", "10.0.0.2"), 3),
        ({"exclude": "a@b.example:1"}, ("b.example", "10.0.0.2"), 3),
        ({"num_nodes": 2}, ("a", "b.example"), 5),
        ({"num_gpus": 4}, ("a", "b.example", "10.0.0.2"), 12),
    ],
)
def test_the_choice_among_hosts(
    tmp_path: Path, options: dict[str, Any], names: tuple[str, ...], processes: int
) -> None:
    """As DeepSpeed documents --include and --exclude."""
    chosen = deployment(tmp_path, ABC, **options)
    assert (chosen.hosts, chosen.processes) == (names, processes)


@pytest.mark.parametrize(
    ("text", "options", "slots"),
    [
        ("localhost slots=3\n", {}, (0, 1, 2)),
        (f"{socket.gethostname()} slots=4\n", {"exclude": f"{socket.gethostname()}:0"}, (1, 2, 3)),
        ("127.0.0.1 slots=1\na slots=2\n", {"num_nodes": 1, "num_gpus": 2}, (0, 1)),
        (None, {"include": "localhost:1,3"}, (1, 3)),
        (None, {"exclude": "localhost:2"}, (0, 1, 3)),
        (None, {"num_gpus": 2}, (0, 1)),
    ],
)
def test_slots_of_this_machine(
    tmp_path: Path, text: str | None, options: dict[str, Any], slots: tuple[int, ...]
) -> None:
    """One host that is this machine needs no launcher, as without a hostfile."""
    chosen = (
        hosts.open_deployment(LaunchOptions(**options), most=4)
        if text is None
        else deployment(tmp_path, text, **options, launcher="slurm")
    )
    assert (chosen.processes, chosen.hosts, chosen.slots) == (len(slots), (), slots)


def test_gpus_of_slots() -> None:
    assert launcher.visible_devices((1, 3), {}) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert launcher.visible_devices((1, 3), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert launcher.visible_devices((), {"CUDA_VISIBLE_DEVICES": "4"}) == {}


@pytest.mark.parametrize("name", ["pdsh", "openmpi", "mpich", "impi", "slurm"])
def test_the_command_is_one_that_deepspeed_reads(name: str, tmp_path: Path) -> None:
    options = LaunchOptions(hostfile="hosts.txt", launcher=name, include="a:0", launcher_args="-x 'a b'")
    words = hosts.deepspeed_command(options, "10.0.0.9", 2951, ["team.py", "10.0.0.9", "2951"])
    assert words[1:4] == ["-P", "-m", "deepspeed.launcher.runner"]
    read = runner.parse_args(words[4:])
    assert (read.hostfile, read.launcher) == (os.path.abspath("hosts.txt"), name)
    assert (read.include, read.launcher_args, read.force_multi, read.no_ssh_check) == ("a:0", "-x 'a b'", True, True)
    assert (read.master_addr, read.master_port) == ("10.0.0.9", 2951)
    assert (read.user_script, read.user_args) == ("team.py", ["10.0.0.9", "2951"])
