"""Memory of a CPU: weights where loads from them are fast, and pages that stay with the process."""

import ctypes
import functools
import os

from torch import nn

LINE = 64
"""bytes of a cache line"""


def align(model: nn.Module) -> None:
    """Align weights to cache lines. safetensors maps them from a file at any multiple of 8 bytes, and then decode steps
    (135M, bf16) take 1.1 times as long."""
    for weight in model.parameters():
        if weight.data_ptr() % LINE:
            weight.data = weight.data.clone()


@functools.cache
def keep_freed_memory() -> None:
    """Set glibc to reuse the memory of freed tensors, and not to return it to the system.

    Otherwise most tensors are new pages, which the system clears, and which a virtual machine may have to request from
    its host: there they take a third of a training step of a 135M model. It is not done before training, because memory
    that loading a model has freed would stay with the process. A MALLOC_ variable in the environment takes precedence.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_max = -1, -2, -4  # M_... of malloc.h
        for parameter, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
            mallopt(parameter, value)
