"""SLURM: the place of a task, and the batch script: signals passed on, requeued only when asked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.launch import slurm
from tests.processes import until

ROOT = Path(__file__).parents[3]
STEP = {
    "SLURM_JOB_ID": "31234",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "gpu[03-05,09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


def adopted(**environment: str) -> dict[str, str]:
    slurm.adopt(environment)
    return environment


def test_a_task_of_a_step_has_its_place() -> None:
    found = {name: value for name, value in adopted(**STEP).items() if name not in STEP}
    assert found == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21234",
    }
    assert adopted(**STEP, MASTER_ADDR="10.0.0.1")["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script's
        {**STEP, "RANK": "0"},  # torchrun inside of a step
    ],
)
def test_what_is_no_task_among_several_stays_as_it_is(environment: dict[str, str]) -> None:
    assert adopted(**environment) == environment


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("a,b", "a"), ("gpu[07-09,12],m1", "gpu07"), ("r1n[3]-ib,x", "r1n3-ib"), ("c[1,4]", "c1")],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert slurm.first_host(nodes) == first


def test_tasks_per_node() -> None:
    assert slurm.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert slurm.tasks_per_node("8") == [8] and slurm.tasks_per_node("") == []


# --- the batch script, with programs that note how they are called


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job in whose PATH `scontrol` notes its words, and whose python ends as it is told."""
    tools = {
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol.log; if [ "$1" = show ]; then echo n1; echo n2; fi',
        "python": (
            f'echo "$@" > {tmp_path}/python.log\n'
            f'for w; do case "$w" in *.hosts-*) cat "$w" > {tmp_path}/hosts;; esac; done\n'
            f"trap 'exit 75' USR1; trap 'exit 143' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
        ),
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    own = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]"}
    return os.environ | own | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.skipif(sys.platform == "win32", reason="bash")
@pytest.mark.parametrize(
    ("number", "requeue", "code"), [(signal.SIGUSR1, "1", 75), (signal.SIGUSR1, "", 75), (signal.SIGTERM, "1", 143)]
)
def test_the_batch_script(job: dict[str, str], tmp_path: Path, number: int, requeue: str, code: int) -> None:
    script = ["bash", str(ROOT / "scripts" / "slurm" / "rlhf.sbatch"), "--output-dir", "runs/a b"]
    with subprocess.Popen(script, env=job | {"REQUEUE": requeue}) as process:
        until((tmp_path / "ready").exists)
        process.send_signal(number)
        assert process.wait(60) == code
    words = (tmp_path / "python.log").read_text()
    assert words.startswith("train.py --deployment-type multi_node --hostfile ")
    assert words.endswith("--remote-shell srun --output-dir runs/a b\n")
    assert (tmp_path / "hosts").read_text() == "n1 slots=4\nn2 slots=4\n"
    asked = (tmp_path / "scontrol.log").read_text().splitlines()
    assert asked == ["show hostnames n[1-2]", *(["requeue 9"] if code == 75 and requeue else [])]
    assert not list(tmp_path.glob(".hosts-*"))


@pytest.mark.parametrize("name", ["rlhf", "stage"])
def test_the_scripts_are_bash(name: str) -> None:
    path = ROOT / "scripts" / "slurm" / f"{name}.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert "#SBATCH --requeue\n" in path.read_text() and "USR1@300\n" in path.read_text()
