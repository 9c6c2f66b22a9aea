"""Work in several processes of this machine, none of which outlives the one that began them."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from rlhf.errors import UserError
from rlhf.hub.limits import leave_signals_to, uninterrupted


def run_forked(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job in a forked process of its own, to its end. The first that fails, and Ctrl-C, end all at once.

    Needs neither semaphores nor shared memory.
    Raises: UserError of a job; RuntimeError for another error, which the process has printed, or a process killed.
    """
    fork = multiprocessing.get_context("fork")
    processes = []
    waiting: list[Connection] = []
    try:
        for job in jobs:
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(job, theirs, os.getpid()), daemon=True)
            with uninterrupted():
                process.start()
            theirs.close()
            processes.append(process)
            waiting.append(ours)
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                _require_done(ready)
                waiting.remove(ready)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _require_done(ours: Connection) -> None:
    try:
        mistake = ours.recv()
    except EOFError:
        raise RuntimeError("a process failed (see above) or was killed (often: the machine is out of memory)") from None
    if mistake:
        raise UserError(mistake)


def _work(job: Callable[[], object], theirs: Connection, parent: int) -> None:
    leave_signals_to(parent)
    try:
        job()
        theirs.send("")
    except UserError as error:
        theirs.send(str(error))
