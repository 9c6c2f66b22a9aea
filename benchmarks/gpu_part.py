"""What every part of benchmarks/gpu.py has: options, a file of results, medians."""

import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from benchmarks.harness import seconds_of
from rlhf.config import Config

PROMPT, RESPONSE = 256, 256


class Options(Config):
    """What to run, and how large."""

    only: tuple[str, ...] = ()
    """parts to run; none: all"""
    tiny: bool = False
    """tiny models, on any machine"""
    limit_s: int = Field(120, ge=1)
    """seconds of each part; with --tiny ten times as many"""
    output: str = "build/gpu"
    """folder of the results, gpu-PART.json"""
    work: str = "build/gpu"
    """folder of models and runs"""
    part: str | None = None
    """run this part in this process; the program sets it itself"""

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a prompt and of a response."""
        return (8, 8) if self.tiny else (PROMPT, RESPONSE)


class Results:
    """The numbers of a part, written to disk after each of them, with the machine, versions and date."""

    def __init__(self, path: Path) -> None:
        self.path, self._numbers = path, {"machine": machine()}
        self.failed = False
        """whether a program of the part ended with an exit code other than 0"""

    def add_code(self, name: str, code: int) -> None:
        """Record and print the exit code of a program."""
        self.failed |= code != 0
        self.add(**{name: code})

    def add(self, **numbers: Any) -> None:
        """Record and print numbers."""
        self._numbers |= numbers
        self.path.write_text(json.dumps(self._numbers, indent=1) + "\n", encoding="utf-8")
        print(" ".join(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                       for name, value in numbers.items()), flush=True)  # fmt: skip


def machine() -> dict[str, Any]:
    """The card, or the CPU's architecture, and what was measured with."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")}
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": card, "cuda": torch.version.cuda, **versions, "date": time.strftime("%Y-%m-%d")}


def median(call: Callable[[], object], options: Options, repeats: int = 5) -> float:
    """The median of the seconds of a call, each until the device has done its work, after a warm-up."""
    call()
    return statistics.median(seconds_of(call) for _ in range(1 if options.tiny else repeats))
