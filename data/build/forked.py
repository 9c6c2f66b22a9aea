"""Jobs in forked processes, none of which outlives the process that started them."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from rlhf.errors import UserError
from rlhf.hub.limits import leave_signals_to, uninterrupted


def run_forked(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job in its own forked process, and wait for all. A failing job, or Ctrl-C, ends all of them.

    Needs neither semaphores nor shared memory.
    Raises: UserError of a job; RuntimeError if a process failed otherwise (it printed the error) or was killed.
    """
    fork = multiprocessing.get_context("fork")
    processes = []
    receivers: list[Connection] = []
    try:
        for job in jobs:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_run_job, args=(job, sender, os.getpid()), daemon=True)
            with uninterrupted():
                process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        while receivers:
            for ready in wait(receivers):
                assert isinstance(ready, Connection)
                _wait_for_success(ready)
                receivers.remove(ready)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait_for_success(receiver: Connection) -> None:
    try:
        error = receiver.recv()
    except EOFError:
        raise RuntimeError("a process failed (see above) or was killed (often: the machine is out of memory)") from None
    if error:
        raise UserError(error)


def _run_job(job: Callable[[], object], sender: Connection, parent: int) -> None:
    leave_signals_to(parent)
    try:
        job()
        sender.send("")
    except UserError as error:
        sender.send(str(error))
