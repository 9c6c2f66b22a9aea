"""Programs on two ranks, without torchrun.

torchrun starts three processes, each of which imports torch, transformers and DeepSpeed. Here the ranks are forks of
one process that has imported them once for all tests of a pytest process, and has done nothing else.
"""

import gc
import multiprocessing
import os
import runpy
import sys
import time
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
LIBRARIES = [
    "deepspeed",
    "pandas",
    "peft",
    "pyarrow",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "tyro",
]
"""only what no test changes: a rank imports the tree itself"""


def run(module: str, *argv: str, timeout_s: float = 600.0) -> str:
    """Run `python -m module argv` as rank 0 and as rank 1.

    Returns: what both print on stdout.
    Raises: AssertionError with the end of a rank's stderr if it fails or takes longer than `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in (0, 1)]
        ranks = [
            context.Process(target=_run, args=(module, argv, {**os.environ, **meeting, **_numbers(rank)}, output))
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
        errors = "\n".join(output.with_suffix(".err").read_text(encoding="utf-8")[-4000:] for output in outputs)
        assert codes == [0, 0], f"{module}: exit codes {codes}, expected [0, 0] within {timeout_s:g} s\n{errors}"
        return "".join(output.with_suffix(".out").read_text(encoding="utf-8") for output in outputs)


def _numbers(rank: int) -> dict[str, str]:
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return both | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}


def _run(module: str, argv: tuple[str, ...], environment: dict[str, str], output: Path) -> None:
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *argv]
    gc.freeze()  # DeepSpeed collects garbage for every engine, a third of a second a time among all that is imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)
