"""The states of a process's random generators as JSON values, so that a resumed run draws the same numbers."""

import random
from typing import Any

import numpy as np
import torch

from rlhf.distributed import collectives


def seed(number: int, step: int) -> None:
    """Seed torch's generators for what follows `step`, differently on each rank."""
    torch.manual_seed((number * 1_000_003 + step) * 4096 + collectives.rank())


def state() -> dict[str, Any]:
    """The states of torch's CPU and GPU generators, and of numpy and Python, which a user's score function may use."""
    gpu = bytes(torch.cuda.get_rng_state().tolist()).hex() if torch.cuda.is_available() else None
    legacy: Any = np.random.get_state(legacy=False)
    legacy["state"]["key"] = legacy["state"]["key"].tolist()
    return {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "gpu": gpu,
        "python": random.getstate(),
        "numpy": legacy,
    }


def set_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(saved["torch"])), dtype=torch.uint8))
    if saved["gpu"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(saved["gpu"])), dtype=torch.uint8))
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    state = saved["numpy"]["state"]
    key = np.array(state["key"], dtype=np.uint32)
    np.random.set_state({**saved["numpy"], "state": {**state, "key": key}})
