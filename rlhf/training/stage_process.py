"""The process of one stage: its command line, and how it ends. A user's mistake is one line and code 2.

Importing this module must not import torch, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

from rlhf import console, errors, streams
from rlhf.config import parser
from rlhf.config.options import RunOptions
from rlhf.config.short_help import STAGE_GROUPS, Groups, short_help
from rlhf.errors import UserError
from rlhf.launch import rank_variables
from rlhf.launch.launcher import LAUNCHER_GRACE, end_with_parent, require_open_files
from rlhf.launch.supervisor import GRACE_S, LAUNCHER, ORDERLY, REQUEUE, USER_ERROR

C = TypeVar("C", bound=RunOptions)

PATIENCE_S = 5.0
"""a rank that has nothing of its own to say waits this long, to be ended by the launcher in silence"""


@contextlib.contextmanager
def requeue_on_signal() -> Iterator[None]:
    """Between stages SIGUSR1 ends the chain with code REQUEUE: there is nothing to save."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(REQUEUE)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def stage_main(
    options_of: Callable[[list[str]], type[C]],
    stage: str,
    description: str,
    groups: Groups,
    run: Callable[[C], object],
) -> int:
    """The command line of one stage: the class of its options, parse, run. A user's mistake is one line and code 2.

    `groups`: what `--help` lists beside what every stage has.
    """
    _end_with_launcher()
    streams.ignore_broken_streams()
    program = console.program(f"python -m {stage}")
    argv = rank_variables.without_local_rank(sys.argv[1:])
    try:
        with requeue_on_signal(), _Patience():
            require_open_files()
            rank_variables.adopt(os.environ)
            console.loading(stage, argv)
            if {"--help", "-h"} & {*argv}:
                print(short_help(options_of(argv), program, description, {**groups, **STAGE_GROUPS}))
                return 0
            options = parser.parse(options_of(argv), argv, program, description)
            from rlhf.distributed import rendezvous
            from rlhf.storage import manifests

            rendezvous.check_ranks(options)
            manifests.require_writable(options.output_dir, stage)
            console.quiet_libraries()
            run(options)
    except UserError as error:
        give_up(f"error: {error}{_save_traceback(error, stage, argv)}", USER_ERROR)
    except OSError as error:
        if errors.system_error_line(error) is None:
            raise
        give_up(f"error: {errors.system_error_line(error)}", USER_ERROR)
    except KeyboardInterrupt:
        give_up("interrupted", 130)
    end_well()
    return 0


def _save_traceback(error: UserError, stage: str, argv: Sequence[str]) -> str:
    """Where the traceback lies of what a user's own code has raised; nothing is written for other mistakes."""
    folder = Path(parser.peek(argv, "output-dir", RunOptions().output_dir)) / stage
    if error.__cause__ is None or not folder.is_dir():
        return ""
    path = folder / f"traceback-{rank_variables.rank()}.txt"
    with contextlib.suppress(OSError):
        path.write_text("".join(traceback.format_exception(error.__cause__)), encoding="utf-8")
        return f"; the traceback is in {path}"
    return ""


def end_well() -> None:
    """End a rank of several at once, with code 0: threads of the libraries can abort one that takes itself apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    if rank_variables.world_size() > 1:
        os._exit(0)


def give_up(message: str, code: int) -> NoReturn:
    """End this rank with one line. Rank 0 goes first, and its launcher then ends the others, who would say the same."""
    if rank_variables.rank() > 0:
        _wait_to_be_ended()
    if rank_variables.rank() == 0 or code not in ORDERLY:
        print(message, file=sys.stderr, flush=True)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # torchrun ends its own report with this
        details = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": details}), encoding="utf-8")
    if rank_variables.world_size() > 1:
        sys.stdout.flush()
        os._exit(code)  # at once: leaving the process group can take as long as the others wait
    raise SystemExit(code)


def _wait_to_be_ended() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run only remembers it
    time.sleep(PATIENCE_S)


class _Patience:
    """Lets the rank that failed first speak first: one that only lost its peer, or is not rank 0, waits."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, SystemExit | UserError | KeyboardInterrupt) or error is None:
            return
        if rank_variables.rank() > 0 or re.search(r"closed by peer|reset by peer|Broken pipe|NCCL|gloo", str(error)):
            _wait_to_be_ended()


def _end_with_launcher() -> None:
    """When the launcher is gone, even by SIGKILL, end: asked by SIGTERM on Linux, and killed if that is no help."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    end_with_parent(int(launcher))
    grace_s = float(os.environ.get(LAUNCHER_GRACE, GRACE_S))
    threading.Thread(target=_outlive_by, args=(int(launcher), grace_s), daemon=True).start()


def _outlive_by(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
