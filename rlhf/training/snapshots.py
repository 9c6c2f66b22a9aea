"""What one rank writes of a checkpoint: the state at a step, and the files that it becomes."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.storage import disk, manifests

STATE = "state.json"
PART_BYTES = 1 << 29
"""tensors that a rank holds back before it writes them: what saving costs in memory"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this rank writes of a checkpoint, and how long the logs are at this step."""

    numbers: Mapping[str, Any]
    tensors: Mapping[str, Iterable[tuple[str, Tensor]]]
    """in fp32 on the CPU; ranks go through those that are not copied together"""
    random: Mapping[str, Any]
    logs: Mapping[str, int]


class Writer:
    """Writes this rank's files; after the first failure it writes no more, and the other ranks' collectives go on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self.digests: dict[str, dict[str, Any]] = {}
        self.failure = ""

    def json(self, name: str, value: Any) -> None:
        self._guarded(name, lambda path: disk.write_json(path, value))

    def tensors(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        part = size = 0
        for key, tensor in tensors:
            if self.failure:
                continue
            self._held[key] = tensor
            size += tensor.numel() * 4
            if size >= PART_BYTES:
                self._part(name, part)
                part, size = part + 1, 0
        self._part(name, part)

    def _part(self, name: str, part: int) -> None:
        held, self._held = self._held, {}
        if held:
            file = f"{name}.rank-{collectives.rank()}.part-{part}.safetensors"
            self._guarded(file, lambda path: disk.save_tensors(held, path))

    def _guarded(self, name: str, write: Callable[[Path], object]) -> None:
        path = self._folder / name
        if self.failure:
            return
        try:
            write(path)
            disk.flush(path)
            self.digests[name] = manifests.digest(path)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._folder).free if self._folder.exists() else 0
            self.failure = (
                f"rank {collectives.rank()} cannot write {path} ({error}); {free / 1e6:,.0f} MB are free there"
            )


def write(staging: Path, snapshot: Snapshot) -> Writer:
    """Into the directory `staging`. Ranks do this together, unless the tensors are copies."""
    writer = Writer(staging)
    for name, tensors in snapshot.tensors.items():
        writer.tensors(name, tensors)
    writer.json(f"rng.rank-{collectives.rank()}.json", snapshot.random)
    if collectives.is_main():
        writer.json(STATE, snapshot.numbers)
    return writer
