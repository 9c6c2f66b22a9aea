"""`python -c PROGRAM`, `python -m MODULE` and `python FILE` without seconds of imports.

The process is a fork of one that has imported the libraries once for all tests of a pytest process, and has done
nothing else. A test of what a fresh interpreter imports needs a fresh one.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf.launch.rank_variables import RANK_VARIABLES
from tests.support.disk import skip_fsync

LIBRARIES = [
    "datasets",
    "deepspeed",
    "pandas",
    "peft",
    "pyarrow",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
]
"""only what no test changes: a process imports the tree itself"""


def context() -> ForkServerContext:
    """Of processes that are forked from the one with LIBRARIES."""
    result = multiprocessing.get_context("forkserver")
    result.set_forkserver_preload(LIBRARIES)
    return result


def process(words: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path) -> ForkServerProcess:
    """`python words`, not yet started. It writes `output`.out and `output`.err."""
    return context().Process(target=_run, args=(tuple(words), dict(environment), output, folder))


def text(output: Path) -> tuple[str, str]:
    """What such a process has written on stdout and on stderr."""
    out, error = (output.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".out", ".err"))
    return out, error


def python(
    *words: str, cwd: Path | None = None, timeout_s: float = 600.0, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """What `python words` does in `cwd`, to its end."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "0"
        child = process(words, environment, output, Path.cwd() if cwd is None else cwd)
        child.start()
        try:
            child.join(timeout_s)
            code = child.exitcode
        finally:
            child.kill()
            child.join()
        out, error = text(output)
        assert code is not None, f"{words}: no end within {timeout_s:g} s\n{error[-4000:]}"
        return subprocess.CompletedProcess(["python", *words], code, out, error)


def program(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What `python -m words` does, with the stages that it starts in the same process. It is no rank, whatever
    DeepSpeed has left in the environment of the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return python("-m", "tests.support.one_process", *words, cwd=cwd, environment=environment)


def _run(words: tuple[str, ...], environment: dict[str, str], output: Path, folder: Path) -> None:
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.orig_argv = ["python", *words]
    skip_fsync()
    gc.freeze()  # DeepSpeed collects garbage for every engine, a third of a second a time among all that is imported
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
