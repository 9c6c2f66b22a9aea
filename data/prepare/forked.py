"""Jobs in forked processes, none of which outlives the process that started them."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from rlhf.errors import UserError
from rlhf.launch.launcher import end_with_parent


def run_forked(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job in its own forked process, and wait for all. A failing job, or Ctrl-C, ends all of them.

    Needs neither semaphores nor shared memory.
    Raises: UserError of a job, or if a process was killed; RuntimeError if one failed otherwise (it printed the error).
    """
    fork = multiprocessing.get_context("fork")
    processes: dict[Connection, ForkProcess] = {}
    waiting: list[Connection] = []
    try:
        for job in jobs:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_run_job, args=(job, sender, os.getpid()), daemon=True)
            process.start()
            sender.close()
            processes[receiver] = process
            waiting.append(receiver)
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                _wait_for_success(ready, processes[ready])
                waiting.remove(ready)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _wait_for_success(receiver: Connection, process: ForkProcess) -> None:
    try:
        error = receiver.recv()
    except EOFError:
        process.join()
        if (code := process.exitcode or 0) < 0:
            name = signal.Signals(-code).name
            raise UserError(
                f"a process that tokenises rows was ended by {name} (often: the machine is out of memory); free memory "
                "and run the same command again"
            ) from None
        raise RuntimeError("a process that tokenises rows failed (see above)") from None
    if error:
        raise UserError(error)


def _run_job(job: Callable[[], object], sender: Connection, parent: int) -> None:
    _leave_signals_to(parent)
    try:
        job()
        sender.send("")
    except UserError as error:
        sender.send(str(error))


def _leave_signals_to(parent: int) -> None:
    """In a process forked by `parent`: ignore Ctrl-C, which the parent handles, and end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
