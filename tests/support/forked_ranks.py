"""Programs on two ranks, without torchrun.

torchrun starts three processes, each of which imports torch, transformers and DeepSpeed. Here the ranks are forks of
one process that has imported them (tests/support/forked.py).
"""

import os
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

from tests.support import forked

LOOPBACK = "127.0.0.1"


class Ended(NamedTuple):
    """Of each rank: the exit code, None if it was killed because the other had failed; stdout; stderr."""

    codes: list[int | None]
    out: list[str]
    err: list[str]


def run(module: str, *argv: str, timeout_s: float = 600.0) -> str:
    """Run `python -m module argv` as rank 0 and as rank 1.

    Returns: what both print on stdout.
    Raises: AssertionError with the end of a rank's stderr if it fails or takes longer than `timeout_s`.
    """
    ended = finish(module, *argv, timeout_s=timeout_s)
    errors = "\n".join(text[-4000:] for text in ended.err)
    assert ended.codes == [0, 0], f"{module}: exit codes {ended.codes}, expected [0, 0] in {timeout_s:g} s\n{errors}"
    return "".join(ended.out)


def launch(module: str, argv: Sequence[str], processes: int) -> int:
    """In place of `rlhf.launch.launcher.run`, for two processes: what both print is printed here."""
    assert processes == 2
    print(run(module, *argv))
    return 0


def finish(module: str, *argv: str, timeout_s: float = 600.0) -> Ended:
    """The same until both have ended, the first has failed, or `timeout_s` have passed. One GPU cannot serve two ranks:
    the test is skipped."""
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need two GPUs; this machine has one")
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in (0, 1)]
        ranks = [
            forked.process(("-m", module, *argv), {**os.environ, **meeting, **_numbers(rank)}, output, Path.cwd())
            for rank, output in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
        try:
            running, end = set(ranks), time.monotonic() + timeout_s
            while running and not any(process.exitcode for process in ranks) and time.monotonic() < end:
                connection.wait([process.sentinel for process in running], end - time.monotonic())
                running = {process for process in running if process.exitcode is None}
        finally:
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
                process.join()
        out, err = zip(*map(forked.text, outputs), strict=True)
        return Ended(codes, list(out), list(err))


def _numbers(rank: int) -> dict[str, str]:
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return both | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
