"""The process of one stage: its command line, and how it ends. A user's mistake is one line and code 2.

Importing this module must not import torch, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from rlhf import console, errors, private_folders, streams
from rlhf.config import parser
from rlhf.config.declaration import Declaration
from rlhf.config.options import RunOptions
from rlhf.errors import UserError
from rlhf.launch import rank_variables
from rlhf.launch.launcher import LAUNCHER_GRACE, end_with_parent
from rlhf.launch.supervisor import GRACE_S, LAUNCHER, ORDERLY, REQUEUE, USER_ERROR

C = TypeVar("C", bound=RunOptions)

SPINS = "10000"
"""rounds that a waiting thread of libgomp spins before it sleeps; libgomp's default is 300,000"""
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS reads it when CUDA starts; with it, its products are the same each time (NVIDIA's documentation of cuBLAS)"""
PATIENCE_S = 5.0
"""a rank with no error of its own waits this long for the launcher to end it, so that it prints nothing"""


class Requeue(SystemExit):
    """Of a signal, unlike sys.exit in the user's code."""


@contextlib.contextmanager
def requeue_on_signal() -> Iterator[None]:
    """Between stages, SIGUSR1 ends the chain with code REQUEUE, because there is nothing to save."""

    def leave(*_: object) -> NoReturn:
        raise Requeue(REQUEUE)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def fast_imports() -> Iterator[None]:
    """Inside, libraries are imported. No garbage is collected, because collections find nothing then and take a fifth
    of the CPU time (1.0 of 5.2 s, 2026-11-23). torch's threads will sleep after a shorter wait than by default, which
    is longer than a time slice of a core that another program also uses."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def stage_main(
    argv: Sequence[str] | None,
    stage: Declaration,
    options_of: Callable[[list[str]], type[C]],
    run: Callable[[C], object],
) -> int:
    """The process of one stage, with the options that the chain has checked: parse them and run it. A user's mistake is
    one line and code 2.

    options_of: command line -> class of the options
    """
    streams.ignore_broken_streams()
    argv = console.words(argv)
    try:
        with requeue_on_signal(), _Patience():
            private_folders.use()
            rank_variables.adopt(os.environ)
            _end_with_launcher()
            console.loading(stage.name, argv)
            options = parser.parse(options_of(argv), argv, stage.name, stage.title)
            for setting in rank_variables.settings_of_accelerate(os.environ):
                console.status(f"note: `accelerate launch` only starts the processes: {setting}")
            for name, value in CUBLAS.items() if options.deterministic else ():
                os.environ.setdefault(name, value)
            from rlhf.distributed import rendezvous
            from rlhf.storage import manifests

            rendezvous.check_ranks(options, stage.name)
            manifests.require_writable(options.output_dir, stage.name)
            with fast_imports():
                console.quiet_libraries()
            run(options)
    except UserError as error:
        give_up(f"error: {error}{_save_traceback(error, stage.name, argv)}", USER_ERROR)
    except OSError as error:
        if errors.system_error_line(error) is None:
            raise
        give_up(f"error: {errors.system_error_line(error)}", USER_ERROR)
    except KeyboardInterrupt:
        give_up("interrupted", 130)
    end_well()
    return 0


def with_adapter_rates(options: Any, names: Collection[str]) -> Any:
    """The options with the learning rates of their adapter, where it has one. names: options that the user has set"""
    if getattr(options, "adapter", None) is None:
        return options
    from rlhf import adapters  # imported here because it imports torch

    return adapters.with_own_rates(options, names)


def traceback_file() -> str:
    """The name of the file with the traceback of this rank."""
    return f"traceback-{rank_variables.rank()}.txt"


def _save_traceback(error: UserError, stage: str, argv: Sequence[str]) -> str:
    """Write the traceback of an error in the user's own code to a file: a clause for the message, or nothing."""
    folder = Path(parser.peek(argv, "output-dir", RunOptions().output_dir)) / stage
    if error.__cause__ is None or not folder.is_dir():
        return ""
    path = folder / traceback_file()
    with contextlib.suppress(OSError):
        path.write_text("".join(traceback.format_exception(error.__cause__)), encoding="utf-8")
        return f"; the traceback is in {path}"
    return ""


def end_well() -> None:
    """End one of several ranks with code 0 without cleaning up, because threads of libraries can abort the clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    if rank_variables.world_size() > 1:
        os._exit(0)


def give_up(message: str, code: int) -> NoReturn:
    """End this rank with one line. Ranks other than 0 have the same line, and wait for the launcher to end them."""
    if rank_variables.rank() > 0:
        _wait_for_termination()
    if rank_variables.rank() == 0 or code not in ORDERLY:
        print(console.as_typed(message), file=sys.stderr, flush=True)
    errors.tell_torchrun(message)
    if rank_variables.world_size() > 1:
        sys.stdout.flush()
        os._exit(code)  # without leaving the process group, which can take long
    raise SystemExit(code)


def _wait_for_termination(seconds: float = PATIENCE_S) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # in a run, SIGTERM is only stored
    time.sleep(seconds)


class _Patience:
    """Lets the rank that failed first print its error: a rank that is not rank 0 waits, and one that lost its peer
    waits longer, because the peer may be waiting with its message."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, SystemExit | UserError | KeyboardInterrupt) or error is None:
            return
        if re.search(r"closed by peer|reset by peer|Broken pipe|NCCL|gloo", str(error)):
            _wait_for_termination(2 * PATIENCE_S)
        elif rank_variables.rank() > 0:
            _wait_for_termination()


def _end_with_launcher() -> None:
    """End when the launcher is gone, even by SIGKILL: by SIGTERM on Linux, and if it is ours by SIGKILL after the grace
    period."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    end_with_parent(int(launcher))
    grace_s = float(os.environ.get(LAUNCHER_GRACE, GRACE_S))
    threading.Thread(target=_kill_after_parent, args=(int(launcher), grace_s), daemon=True).start()


def _kill_after_parent(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
