"""The chain on two hosts, as a user starts it: by DeepSpeed's launcher, torchrun or srun, and with what goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rlhf.launch.rank_variables import RANK_VARIABLES
from tests.multi_node.world import ROOT, Machine, World
from tests.support.processes import until

pytestmark = pytest.mark.faults
LOSSES = ROOT / "rlhf" / "maths" / "losses.py"
SMALL = [
    *("--data-path", "demo,rows=400", "--max-eval-rows", "8", "--sample-rows", "0"),
    *("--sft.num-train-epochs", "1", "--reward.num-train-epochs", "1"),
    *("--ppo.total-episodes", "64", "--ppo.batch-size", "32", "--ppo.eval-samples", "8"),
]


def chain(hosts: World, out: Path, *argv: str) -> list[str]:
    deployment = ["--deployment-type", "multi_node", "--hostfile", hosts.hostfile()]
    return [sys.executable, "train.py", *SMALL, *deployment, "--output-dir", str(out), *argv]


def nothing_left(hosts: World) -> None:
    until(lambda: not hosts.processes(), 60)


def manifest(out: Path, stage: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((out / stage / "manifest.json").read_text(encoding="utf-8"))
    return content


def test_the_demo(hosts: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = hosts.run(*chain(hosts, out))
    assert done.returncode == 0, done.stderr
    for stage in ("step1_sft", "step2_reward", "step3_ppo"):
        assert manifest(out, stage)["world_size"] == 2
        assert f"{stage}: wrote" in done.stdout
    assert "The tuned policy is" in done.stdout and "[rank 1" not in done.stdout
    stages = ["step1_sft", "step2_reward", "step3_ppo"]
    assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "report.html", *stages]
    nothing_left(hosts)


def rank_on(host: Machine) -> int:
    """The process of the first stage there."""
    lines = {}
    network = os.readlink(f"/proc/{host.pid}/ns/net")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(folder / "ns" / "net") == network:
                lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    [process_id] = [pid for pid, line in lines.items() if " -m step1_sft " in line]
    return process_id


LONGER = ["--steps", "1", "--sft.num-train-epochs", "60", "--save-every", "4", "--max-restarts", "1"]


def steps_of(out: Path) -> int:
    log = out / "step1_sft" / "metrics.jsonl"
    return log.read_text().count('"train"') if log.is_file() else 0


def test_a_rank_killed_on_the_other_host_and_then_a_signal(hosts: World, tmp_path: Path) -> None:
    """The stage starts again by itself; asked to end, it saves and says how to go on."""
    out = tmp_path / "out"
    with hosts.start(chain(hosts, out, *LONGER)) as process:
        until(lambda: steps_of(out) > 5, 500)
        os.kill(rank_on(hosts.beta), signal.SIGKILL)
        now = steps_of(out)
        until(lambda: steps_of(out) > now + 2 or process.poll() is not None, 500)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    # on a busy machine, rank 0 may be in a step that is longer than the launcher waits, which the line then says too
    restart = r"step1_sft: rank 1 on beta: SIGKILL \(often: the machine is out of memory\);.* restart 1 of 1\n"
    assert re.search(restart, stderr), stderr
    command_line, last = stderr.strip().splitlines()[-2:]
    assert last.startswith("step1_sft did not finish: SIGTERM, at step ") and "resumes after" in last
    assert command_line.startswith("to resume: ") and command_line.endswith(" ".join(LONGER))
    nothing_left(hosts)


def test_a_chain_that_is_killed_leaves_nothing_on_either_host(hosts: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with hosts.start(chain(hosts, out, *LONGER)) as process:
        until(lambda: steps_of(out) > 0 or process.poll() is not None, 500)
        process.kill()
        process.communicate(timeout=120)
    nothing_left(hosts)
    assert not (out / "step1_sft" / "manifest.json").exists()


@contextmanager
def over(host: Machine, path: Path, other: Path) -> Iterator[None]:
    """On that host alone, `other` lies where `path` was."""
    host.do("mount", "--bind", str(other), str(path))
    try:
        yield
    finally:
        host.do("umount", str(path))


def test_hosts_with_other_code_refuse_each_other(hosts: World, tmp_path: Path) -> None:
    changed = tmp_path / "losses.py"
    changed.write_text(LOSSES.read_text() + "\n")
    with over(hosts.beta, LOSSES, changed):
        done = hosts.run(*chain(hosts, tmp_path / "out", "--steps", "1"))
    assert done.returncode == 2
    assert "error: rank 1 on beta differs from rank 0 on alpha: rlhf-pipeline " in done.stderr
    nothing_left(hosts)


def test_a_directory_that_is_not_shared(hosts: World, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    with over(hosts.beta, out, other):
        done = hosts.run(*chain(hosts, out, "--steps", "1"))
    assert done.returncode == 2 and "beta: " in done.stderr and "is not visible here after 30 s" in done.stderr
    nothing_left(hosts)


# --- without --hostfile: the chain is started on every host, by torchrun or srun


@contextmanager
def on(
    host: Machine, out: Path, *launcher: str, timeout_s: int = 300, **environment: str
) -> "Iterator[subprocess.Popen[str]]":
    """The chain's first stage on one host; killed at the end if it is still there."""
    step_1 = ["--steps", "1", "--output-dir", str(out), "--rendezvous-timeout-s", str(timeout_s)]
    # without those that a process group of these tests may have left
    plain = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    with subprocess.Popen(
        host.inside(sys.executable, *launcher, "train.py", *SMALL, *step_1),
        cwd=ROOT,
        env=plain | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def torchrun(rank: int, timeout_s: int = 300) -> list[str]:
    rendezvous = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.203.77.1", "--master-port", "29531"]
    return ["-m", "torch.distributed.run", *rendezvous, "--rdzv-conf", f"timeout={timeout_s}"]


def test_the_chain_under_torchrun_on_each_host(hosts: World, tmp_path: Path) -> None:
    with on(hosts.alpha, tmp_path, *torchrun(0)) as one, on(hosts.beta, tmp_path, *torchrun(1)) as two:
        outputs = [process.communicate(timeout=300) for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], outputs
    assert manifest(tmp_path, "step1_sft")["world_size"] == 2
    nothing_left(hosts)


def test_torchrun_with_a_host_missing(hosts: World, tmp_path: Path) -> None:
    """torchrun itself waits for the hosts, as long as it is told."""
    with on(hosts.alpha, tmp_path, *torchrun(0, timeout_s=10)) as process:
        process.communicate(timeout=200)
    assert process.returncode != 0
    nothing_left(hosts)


def srun(rank: int, **environment: str) -> dict[str, str]:
    """The variables of a step of two tasks, as srun sets them."""
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "alpha,beta",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "10.203.77.1",
    }
    return step | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} | environment


def test_the_chain_under_srun(hosts: World, tmp_path: Path) -> None:
    with on(hosts.alpha, tmp_path, **srun(0)) as one, on(hosts.beta, tmp_path, **srun(1)) as two:
        outputs = [process.communicate(timeout=300)[1] for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], outputs
    assert manifest(tmp_path, "step1_sft")["world_size"] == 2


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "1 of 2 ranks did not arrive within 5 s: rank 1; ranks of alpha are there;"),
        (1, "rank 1 on beta: nothing answers at 10.203.77.1:20077 within 5 s;"),
    ],
)
def test_srun_with_a_task_missing(hosts: World, tmp_path: Path, rank: int, message: str) -> None:
    host = (hosts.alpha, hosts.beta)[rank]
    with on(host, tmp_path, timeout_s=5, **srun(rank, RLHF_RENDEZVOUS_TIMEOUT_S="5")) as process:
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2 and f"error: {message}" in stderr
    nothing_left(hosts)
