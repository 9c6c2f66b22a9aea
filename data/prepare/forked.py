"""Jobs in forked processes, none of which outlives the process that started them.

`datasets.map(num_proc=...)` does not do it (5.2): a Ctrl-C ends in a traceback, and after a SIGTERM its processes stay.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from rlhf.errors import UserError
from rlhf.launch.launcher import end_with_parent


def run_forked(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job in its own forked process, and wait for all. A failing job, or Ctrl-C, ends all of them.

    Raises: UserError if a job failed, which has printed why, or its process was killed.
    """
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_run_job, args=(job, os.getpid()), daemon=True) for job in jobs]
    for process in processes:
        process.start()
    running = list(processes)
    try:
        while running:
            wait([process.sentinel for process in running])
            for process in [process for process in running if process.exitcode is not None]:
                _require_success(process)
                running.remove(process)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _require_success(process: multiprocessing.process.BaseProcess) -> None:
    if process.exitcode:
        raise UserError(
            f"a process that tokenises rows ended with exit code {process.exitcode} (-9: often, the machine is out of "
            "memory); free memory, or correct what is said above, and run the same command again"
        )


def _run_job(job: Callable[[], object], parent: int) -> None:
    """Ignores Ctrl-C, which the parent handles, and ends when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    job()
