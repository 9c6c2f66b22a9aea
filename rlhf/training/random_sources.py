"""The states of a process's random generators as JSON values, so that a resumed run draws the same numbers."""

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

from rlhf.config import Tree
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives


def begin(options: RunOptions) -> None:
    """Seed all generators the same on each rank, and (`deterministic`) choose the algorithms of a GPU.

    Flash attention, scatters and others add up with atomics in a backward pass: another order, other last bits. An
    operation that has no deterministic algorithm is named in a warning of torch.
    """
    seed_all(options.seed)
    if options.deterministic and collectives.local_device().type != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # It would write every new tensor once more, to find reads of memory that nothing has set.
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module


def seed_all(number: int) -> None:
    """Seed all generators, the same on each rank. Those of numpy and Python a user's score function may use."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def seed(number: int, step: int) -> None:
    """Seed them for what follows `step`, differently on each rank."""
    seed_all((number * 1_000_003 + step) * 4096 + collectives.rank())


APART = 1_000_002
"""a step that no run has: the streams of `apart`"""


@contextlib.contextmanager
def apart(number: int) -> Iterator[None]:
    """What is drawn in this context depends on the seed only, and changes nothing that is drawn after it."""
    saved = state()
    seed(number, APART)
    try:
        yield
    finally:
        set_state(saved)


def state() -> Tree:
    """The states of torch's CPU and GPU generators, and of numpy and Python."""
    gpu = bytes(torch.cuda.get_rng_state().tolist()).hex() if torch.cuda.is_available() else None
    legacy: Any = np.random.get_state(legacy=False)
    legacy["state"]["key"] = legacy["state"]["key"].tolist()
    return {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "gpu": gpu,
        "python": random.getstate(),
        "numpy": legacy,
    }


def digest() -> str:
    """sha256 of the states."""
    return hashlib.sha256(json.dumps(state()).encode()).hexdigest()


def set_state(saved: Tree) -> None:
    """Raises: ValueError, TypeError, LookupError or AttributeError for another value than `state` returns."""
    try:
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(saved["torch"])), dtype=torch.uint8))
    except RuntimeError as error:
        raise ValueError(f"torch: {error}") from None
    if saved["gpu"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(saved["gpu"])), dtype=torch.uint8))
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    state = saved["numpy"]["state"]
    key = np.array(state["key"], dtype=np.uint32)
    np.random.set_state({**saved["numpy"], "state": {**state, "key": key}})
