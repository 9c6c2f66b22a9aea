"""Work in several processes: what one of them raises, and that none is left, whoever ends."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from data.prepare.forked import run_forked
from rlhf.errors import UserError
from tests.support.processes import alive, until

ROOT = Path(__file__).parents[3]


def note(path: Path, number: int) -> None:
    (path / str(number)).write_text(str(os.getpid()))


def mistake() -> None:
    raise UserError("row 7: no text")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_job_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    run_forked([partial(note, tmp_path, i) for i in range(3)])
    pids = {path.read_text() for path in tmp_path.iterdir()}
    assert len(pids) == 3 and str(os.getpid()) not in pids


@pytest.mark.parametrize(("job", "message"), [(mistake, "exit code 1 "), (killed, "exit code -9 ")])
def test_a_failing_job_ends_the_others(job: object, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=message):
        run_forked([partial(time.sleep, 300), job])  # type: ignore[list-item]
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, -15),
        (signal.SIGKILL, False, -9),
    ],
)
def test_no_process_outlives_its_parent(number: int, to_all: bool, code: int, tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    program = (
        "import sys, time; from functools import partial; from pathlib import Path\n"
        "from data.prepare.forked import run_forked; from rlhf.errors import run_as_user\n"
        "def job(i): (Path(sys.argv[1]) / str(i)).touch(); time.sleep(300)\n"
        "sys.exit(run_as_user(lambda: run_forked([partial(job, i) for i in range(3)])))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), mark]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as started:
        until(lambda: len(list(tmp_path.iterdir())) == 3)
        assert len(alive(mark)) == 4
        (os.killpg if to_all else os.kill)(started.pid, number)
        _, message = started.communicate(timeout=60)
    assert started.returncode == code
    assert message == ("interrupted\n" if number == signal.SIGINT else "")
    until(lambda: not alive(mark), 10)
