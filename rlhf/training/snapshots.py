"""The files of one rank in a checkpoint: its state at a step, and the writing of it."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.storage import disk, manifests

STATE = "state.json"
PART_BYTES = 1 << 29
"""bytes of tensors that a rank collects for one file: the memory that saving needs"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank, and the lengths of the logs at this step."""

    numbers: Mapping[str, object]
    tensors: Mapping[str, Iterable[tuple[str, Tensor]]]
    """by source, in fp32 on the CPU; all ranks iterate together"""
    random: Mapping[str, object]
    logs: Mapping[str, int]


class SnapshotWriter:
    """Writes this rank's files. After a failure it writes no more, but still takes part in the collectives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffer: dict[str, Tensor] = {}
        self.digests: dict[str, Tree] = {}
        self.failure = ""

    def json(self, name: str, value: object) -> None:
        self._write(name, lambda path: disk.write_json(path, value))

    def tensors(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        part = size = 0
        for key, tensor in tensors:
            if self.failure:
                continue
            self._buffer[key] = tensor
            size += tensor.numel() * 4
            if size >= PART_BYTES:
                self._write_part(name, part)
                part, size = part + 1, 0
        self._write_part(name, part)

    def _write_part(self, name: str, part: int) -> None:
        tensors, self._buffer = self._buffer, {}
        if tensors:
            file = f"{name}.rank-{collectives.rank()}.part-{part}.safetensors"
            self._write(file, lambda path: disk.save_tensors(tensors, path))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
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


def write(staging: Path, snapshot: Snapshot) -> SnapshotWriter:
    """Write a snapshot into the directory `staging`. All ranks call this together."""
    writer = SnapshotWriter(staging)
    for name, tensors in snapshot.tensors.items():
        writer.tensors(name, tensors)
    writer.json(f"rng.rank-{collectives.rank()}.json", snapshot.random)
    if collectives.is_main():
        writer.json(STATE, snapshot.numbers)
    return writer
