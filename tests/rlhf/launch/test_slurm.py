"""The scripts of SLURM: signals passed on, requeued only when asked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job in whose PATH `scontrol` notes its words, and whose srun ends as it is told."""
    tools = {
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol.log',
        "srun": (
            f'echo "$@" > {tmp_path}/srun.log\n'
            f"trap 'exit 75' USR1; trap 'exit 143' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
        ),
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    # `make test PYTHON=python3.12` passes its PYTHON on, and the scripts would follow it.
    return os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "9", "PATH": path, "PYTHON": "python"}


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
    words = (tmp_path / "srun.log").read_text()
    assert words == "--kill-on-bad-exit=0 --unbuffered python train.py --output-dir runs/a b\n"
    log = tmp_path / "scontrol.log"
    assert log.exists() == (code == 75 and bool(requeue))
    assert not log.exists() or log.read_text() == "requeue 9\n"


AT_ONCE = """#!/usr/bin/env python3
import os, pathlib, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
pathlib.Path(__file__).with_name("ready").touch()
while True:  # signal.pause() would wait for a second signal if the first one came right before it
    time.sleep(0.1)
"""


def test_the_code_of_a_step_that_ends_at_once_is_not_lost(job: dict[str, str], tmp_path: Path) -> None:
    """One signal ends both `wait` and the step: in one of six times `wait` came first (2026-11-23)."""
    (tmp_path / "srun").write_text(AT_ONCE)
    for _ in range(20):
        (tmp_path / "ready").unlink(missing_ok=True)
        with subprocess.Popen(["bash", str(ROOT / "scripts" / "slurm" / "rlhf.sbatch")], env=job) as process:
            until((tmp_path / "ready").exists)
            process.send_signal(signal.SIGUSR1)
            assert process.wait(60) == 75


@pytest.mark.parametrize("name", ["rlhf", "stage"])
def test_the_scripts_are_bash(name: str) -> None:
    path = ROOT / "scripts" / "slurm" / f"{name}.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert "#SBATCH --requeue\n" in path.read_text() and "USR1@300\n" in path.read_text()
