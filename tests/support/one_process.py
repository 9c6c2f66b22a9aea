"""A program whose stages run in its own process: a fresh interpreter for each takes five CPU seconds.

python -m tests.support.one_process MODULE WORDS

As one of several ranks it is the process of a stage, which a chain would start.
"""

import importlib
import os
import runpy
import sys

from rlhf.launch import launcher
from rlhf.launch.supervisor import ExitStatus


def run_stage(module: str, words: list[str], target: object) -> ExitStatus:
    """In place of `rlhf.launch.launcher.run`."""
    try:
        return ExitStatus(importlib.import_module(f"{module}.__main__").process(words))
    except SystemExit as leaving:
        return ExitStatus(int(str(leaving.code)))


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(importlib.import_module(f"{sys.argv[1]}.__main__").process(sys.argv[2:]))
    launcher.run = run_stage
    sys.argv = sys.argv[1:]
    sys.orig_argv = ["python", "-m", *sys.argv]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
