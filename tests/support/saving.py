"""Checkpoints of a few numbers, and what two ranks do with them, all in one launch:

    torchrun --nproc-per-node=2 -m tests.support.saving FOLDER

writes FOLDER/seen.json: what every check came to, on each rank.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.storage import disk
from rlhf.training import checkpoints, stage_process
from rlhf.training.checkpoints import Resumable
from tests.support.killing import Killed

ABOUT: dict[str, Any] = {"stage": "step1_sft", "config": {"seed": 0}, "inputs": {}, "models": []}
WEIGHTS = torch.tensor([1.5, -2.0, 0.25])


class Memory:
    """A number and some tensors, each of which one rank writes."""

    def __init__(self, by_name: dict[str, Tensor]) -> None:
        self.by_name, self.count = by_name, len(by_name)

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int) -> None:
        self.count = state

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, tensor) in enumerate(sorted(self.by_name.items())):
            if i % collectives.world_size() == collectives.rank():
                yield name, tensor

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in saved:
            self.by_name[name].copy_(tensor)


def save(
    stage: Path, step: int, parts: Mapping[str, Memory] | None = None, keep: int = 2, about: Mapping[str, Any] = ABOUT
) -> str | None:
    parts = parts or {"weights": Memory({"w": WEIGHTS.clone()})}
    return checkpoints.save(stage, step, Resumable(parts, parts), about, keep)


def whole(stage: Path) -> int:
    """The step of the newest checkpoint, after it was read."""
    checkpoint = checkpoints.newest(stage)
    assert checkpoint is not None
    names = [name for name in ("w", "x") if name == "w" or collectives.world_size() > 1]
    memory = Memory({name: torch.zeros(3) for name in names})
    checkpoint.restore(Resumable({"weights": memory}, {"weights": memory}), seed=0)
    assert all(torch.equal(tensor, WEIGHTS) for tensor in memory.by_name.values())
    return checkpoint.step


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes; Python ignores the signal, so that writing fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def killed_by(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, chosen: Callable[..., bool], after: bool) -> None:
    """The process dies in the call `where.name` whose arguments are `chosen`: before the call, or right after."""
    real = getattr(where, name)

    def dying(*arguments: Any, **named: Any) -> Any:
        if chosen(*arguments):
            if after:
                real(*arguments, **named)
            raise Killed
        return real(*arguments, **named)

    monkeypatch.setattr(where, name, dying)


def always(*_: Any) -> bool:
    return True


def manifests(path: Path, _: Any) -> bool:
    return path.name == "manifest.json"


def whole_ones(path: Path, *_: Any) -> bool:
    return path.name.startswith("step-") and path.exists()


POINTS: dict[str, tuple[Any, str, Callable[..., bool], bool, bool]] = {
    "before any write": (checkpoints, "write", always, False, False),
    "before a shard": (disk, "save_tensors", always, False, False),
    "after a shard": (disk, "save_tensors", always, True, False),
    "before the manifest": (disk, "write_json", manifests, False, False),
    "after the manifest": (disk, "write_json", manifests, True, False),
    "before the rename": (os, "rename", always, False, False),
    "after the rename": (os, "rename", always, True, True),
    "before an old one goes": (shutil, "rmtree", whole_ones, False, True),
    "after an old one went": (shutil, "rmtree", whole_ones, True, True),
}
"""Where a save can be cut off: the call, which of them, whether after it, and whether the new one is there then."""


HARMS: dict[str, tuple[str, ...]] = {
    "cut": ("weights.rank-0.part-0.safetensors", "weights.rank-1.part-0.safetensors", "rng.rank-1.json"),
    "flipped": ("weights.rank-0.part-0.safetensors", "weights.rank-1.part-0.safetensors", "rng.rank-1.json"),
    "gone": ("weights.rank-1.part-0.safetensors", "state.json", "manifest.json"),
}


def harm(path: Path, kind: str) -> None:
    if kind == "cut":
        os.truncate(path, path.stat().st_size - 5)
    elif kind == "flipped":
        flip(path, -2)
    else:
        path.unlink()


def shared() -> dict[str, Memory]:
    """Of which rank 0 writes w, and rank 1 x."""
    return {"weights": Memory({"w": WEIGHTS.clone(), "x": WEIGHTS.clone()})}


def counted_renames(stage: Path) -> list[str]:
    """What this rank renames in three saves."""
    rename, names = os.rename, []

    def noted(source: Path, target: Path) -> None:
        names.append(Path(target).name)
        rename(source, target)

    os.rename = noted  # type: ignore[assignment]
    try:
        assert [save(stage, step, shared()) for step in (1, 2, 3)] == [None] * 3
    finally:
        os.rename = rename
    return names


def full_on_one(stage: Path, rank: int) -> dict[str, Any]:
    """A save that cannot write on `rank` alone, and one after it."""
    assert save(stage, 1, shared()) is None
    with files_up_to(10) if collectives.rank() == rank else contextlib.nullcontext():
        failure = save(stage, 2, shared())
    collectives.barrier()
    between = sorted(path.name for path in (stage / checkpoints.CHECKPOINTS).iterdir())
    collectives.barrier()  # the next one may begin
    return {"failure": failure, "between": between, "after": save(stage, 3, shared()), "newest": whole(stage)}


def harmed(stage: Path, kind: str, name: str) -> dict[str, Any]:
    """The step that this rank goes on from when the newest checkpoint is damaged, and its error when all are."""
    assert [save(stage, step, shared()) for step in (1, 2)] == [None] * 2
    outcomes: dict[str, Any] = {"whole": whole(stage)}
    for step in (2, 1):
        collectives.barrier()
        if collectives.is_main():
            harm(checkpoints.folder_of(stage, step) / name, kind)
        collectives.barrier()
        try:
            outcomes[f"without {step}"] = whole(stage)
        except UserError as error:
            outcomes[f"without {step}"] = str(error)
    return outcomes


def on_two_ranks(folder: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {"renames": counted_renames(folder / "renames")}
    for rank in (0, 1):
        outcomes[f"full {rank}"] = full_on_one(folder / f"full {rank}", rank)
    for kind, names in HARMS.items():
        for name in names:
            outcomes[f"{kind} {name}"] = harmed(folder / kind / name, kind, name)
    return outcomes


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with collectives.process_group(timeout_s=60):
        both = collectives.gather_objects(on_two_ranks(root))
        if collectives.is_main():
            (root / "seen.json").write_text(json.dumps(both), encoding="utf-8")
    stage_process.end_well()
