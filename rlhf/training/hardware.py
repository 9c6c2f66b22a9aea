"""The hardware of a run, for its manifest."""

import os
import platform
import re
from pathlib import Path

import torch

from rlhf import console
from rlhf.config import Config, Tree
from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.engine.precision import compute_dtype, with_dtype


def describe(options: Config) -> Tree:
    """The device, the processes, and the dtype in which the models of a stage compute: `auto` is another on another
    device."""
    hardware: Tree = {"device": device_name(), "processes": collectives.world_size()}
    if isinstance(options, EngineOptions):
        hardware["dtype"] = with_dtype(options, compute_dtype(options, collectives.local_device())).dtype
    return hardware


def accelerator_note() -> str | None:
    """A line for the user of an accelerator that is no NVIDIA GPU: what is used in its place, and why."""
    if torch.cuda.is_available():
        return None if torch.version.hip is None else "note: an AMD GPU is used as torch's cuda device; none was tried"
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    return f"note: the CPU is used, not the {kind} device: engine, kernels and memory plan know CUDA and ROCm GPUs only"


def say_accelerator() -> None:
    """Print that line, if there is one."""
    note = accelerator_note()
    if note is not None:
        console.say(note)


def device_name() -> str:
    """`NVIDIA H200`, or of a CPU its model and the cores that this process may use."""
    device = collectives.local_device()
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model[1] if model else platform.machine()}, {cores} cores"
