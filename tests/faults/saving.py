"""Two ranks that save without a pause, to be killed; and whether what they leave can be used."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.storage import disk
from rlhf.training import checkpoints
from rlhf.training.checkpoints import Resumable
from tests.support.processes import until

STAGE = {"stage": "step1_sft", "config": {}, "inputs": {}, "models": []}
ROWS = 1 << 14


class Weights:
    """Tensors full of the number of the step, each rank writing every second one."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.step, self.loaded_values = rank, 0, [0.0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i in range(self.rank, 8, 2):
            yield str(i), torch.full((ROWS,), float(self.step))

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]]) -> None:
        tensors = dict(saved)
        assert len(tensors) == 8
        self.loaded_values = torch.stack(list(tensors.values())).unique().tolist()

    def state_dict(self) -> Any:
        return {"step": self.step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


def state_of(weights: Weights) -> Resumable:
    return Resumable({"weights": weights}, {"weights": weights})


def save_without_end(folder: Path, rank: int) -> None:
    store = torch.distributed.FileStore(str(folder / "meeting"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    weights = Weights(rank)
    for weights.step in count(1):
        assert checkpoints.save(folder / "stage", weights.step, state_of(weights), STAGE, keep=2) is None


def kill(folder: Path, victims: list[int], delay_s: float) -> None:
    """Start both, and after the first checkpoint and the delay kill `victims`; then whoever is left."""
    (folder / "stage").mkdir()
    ranks = [_forked(folder, rank) for rank in (0, 1)]
    try:
        until(lambda: checkpoints.newest_manifest(folder / "stage"), 120)
        time.sleep(delay_s)
        for rank in victims:
            os.kill(ranks[rank], signal.SIGKILL)
        time.sleep(0.2)
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _forked(folder: Path, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)  # what the survivor says of its peer
        try:
            save_without_end(folder, rank)
        finally:
            os._exit(1)
    return pid


def require_usable(folder: Path) -> None:
    """The newest checkpoint is whole and of one step, and saving goes on beside what was left behind."""
    stage = folder / "stage"
    checkpoint = checkpoints.newest(stage)
    assert checkpoint is not None
    assert checkpoint.step == max(int(path.name[5:]) for path in (stage / checkpoints.CHECKPOINTS).glob("step-*"))
    weights = Weights()
    weights.load_state_dict(disk.read_json(checkpoint.folder / checkpoints.STATE)["weights"])
    weights.load_tensors(checkpoint._tensors("weights"))
    assert weights.loaded_values == [float(checkpoint.step)] and weights.step == checkpoint.step
    checkpoints.sweep(stage)
    assert not list((stage / checkpoints.CHECKPOINTS).glob(".tmp-*"))
    assert checkpoints.save(stage, checkpoint.step + 1, state_of(weights), STAGE, keep=2) is None
