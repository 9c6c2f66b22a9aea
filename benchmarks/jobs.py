"""Many short trainings: each is a fork of this process with one thread, and is not repeated once it is finished.

A training takes seconds, the imports before it as long. So one process imports everything, and forks itself.
"""

import contextlib
import gc
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from pydantic import Field

from rlhf import errors
from rlhf.config import Config


class JobOptions(Config):
    """Processes and directories."""

    processes: int = Field(2, ge=1)
    """jobs at the same time, each with one thread"""
    output_dir: str = "runs/benchmarks"
    """directory of models and results"""
    results: str = "docs/results"
    """directory of the report"""

    @property
    def folder(self) -> Path:
        """The output directory, absolute."""
        return Path(self.output_dir).absolute()


@dataclass(frozen=True, slots=True)
class Job:
    """A function call in a process of its own."""

    name: str
    call: Callable[[], None]
    finished: Path
    """the file that it writes last"""


def run_jobs(jobs: Sequence[Job], options: JobOptions) -> bool:
    """Run the jobs that are not finished, the output of each into a file of `logs`. Returns whether none failed."""
    waiting = [job for job in jobs if not job.finished.is_file()]
    if not waiting:
        return True
    _import_stages()
    fork, failed = multiprocessing.get_context("fork"), 0
    running: dict[Any, tuple[Any, str, Path, float]] = {}
    logs = options.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < options.processes:
            job = waiting.pop(0)
            log = logs / f"{file_name(job.name)}.log"
            process = fork.Process(target=_in_child, args=(job, log))
            process.start()
            running[process.sentinel] = process, job.name, log, time.monotonic()
        for sentinel in connection.wait(list(running)):
            process, name, log, start = running.pop(sentinel)
            process.join()
            verdict = "" if process.exitcode == 0 else f", failed with code {process.exitcode}: see {log}"
            print(f"{name}: {time.monotonic() - start:.0f} s, {len(waiting)} to go{verdict}", flush=True)
            failed += process.exitcode != 0
    return not failed


def _import_stages() -> None:
    """Import what every fork needs. A fork has none of its parent's threads, so the parent must have started none."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
        import torch
        import transformers.models.llama.modeling_llama  # noqa: F401

        import data.sources.files  # noqa: F401
        import rlhf.chain.command
        import rlhf.generation.loop  # noqa: F401
        import step1_sft.stage  # noqa: F401
        import step2_reward.stage  # noqa: F401
        import step3_ppo.stage  # noqa: F401
    torch.set_num_threads(1)
    gc.freeze()


def _in_child(job: Job, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    raise SystemExit(errors.run_as_user(job.call))


def file_name(name: str) -> str:
    """The name with letters, digits, dots and underscores only."""
    return re.sub(r"[^\w.]", "-", name)
