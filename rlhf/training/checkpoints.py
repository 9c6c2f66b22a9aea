"""Checkpoints of an unfinished stage: committed as a whole or not at all, checked before they are read.

    OUT/STAGE/checkpoints/step-00000012/
        manifest.json                         what it belongs to; size and sha256 of every file; its own; written last
        state.json                            plain numbers
        NAME.rank-R.part-K.safetensors        whole tensors by name, each written by one rank
        rng.rank-R.json                       the random sources of rank R

A directory with that name is complete: it is written under another name, flushed to the disk, and renamed once all
ranks have succeeded. Any number of ranks and any ZeRO stage reads it. Nothing in it is ever executed.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf import console
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.storage import disk, manifests
from rlhf.storage.manifests import CHECKPOINTS, content_digest
from rlhf.training import logs, random_sources
from rlhf.training.snapshots import STATE, Snapshot, write

KINDS = {"step": int, "world_size": int, "logs": dict, "models": list}
"""what a manifest has beside what every manifest has"""
VISIBLE_S = 30.0
"""most seconds that a network file system may take to show a directory that another host has made"""


class Numbers(Protocol):
    """Something that goes on from a few plain numbers, the same on every rank."""

    def state_dict(self) -> Any:
        """As JSON has it."""

    def load_state_dict(self, state: Any, /) -> None: ...


class Tensors(Protocol):
    """Something that goes on from tensors."""

    def size(self) -> int:
        """Bytes of what all ranks write together."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those that this rank is to write, by names no other rank writes. Every rank goes through it together."""

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]], /) -> None:
        """Take what is wanted of all tensors of all ranks. Every rank goes through it together."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """All that a stage goes on from, by name; something may stand in both."""

    numbers: Mapping[str, Numbers]
    tensors: Mapping[str, Tensors]

    def size(self) -> int:
        """Bytes of a checkpoint, a few kilobytes aside."""
        return sum(part.size() for part in self.tensors.values())


Copying = Callable[[str, Iterator[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]]
"""Makes fp32 tensors on the CPU of those of a part, which it gets with the name of the part."""


def save(
    stage: Path, step: int, state: Resumable, about: Mapping[str, Any], keep: int, growing: Sequence[str] = ()
) -> str | None:
    """Commit a checkpoint of `step`, only then delete all but the newest `keep`; every rank calls this together.

    growing: patterns of the stage's files that grow line by line, whose length belongs to the checkpoint.

    Returns why it could not be written, if so: nothing is left of it then, and the ones before it stay.
    """
    return begin(stage, step, state, about, keep, growing)()


def begin(
    stage: Path,
    step: int,
    state: Resumable,
    about: Mapping[str, Any],
    keep: int,
    growing: Sequence[str] = (),
    copy: Copying | None = None,
    group: Any = None,
) -> Callable[[], str | None]:
    """Prepare what `save` does; the result does the rest. Every rank calls both together.

    With `copy`, which copies the tensors of a part at once, the state may change meanwhile, and with a `group` of all
    ranks the result may be called in a thread.
    """
    final = folder_of(stage, step)
    staging = final.with_name(f".tmp-{final.name}")
    failure = collectives.gather_objects(_made_anew(staging) if collectives.is_main() else "")[0]
    if failure:
        return lambda: failure
    _wait_for(staging)
    numbers = {name: deepcopy(part.state_dict()) for name, part in state.numbers.items()}  # some ask all ranks
    tensors = {name: (copy or _one_by_one)(name, part.tensors()) for name, part in state.tensors.items()}
    snapshot = Snapshot(numbers, tensors, random_sources.state(), logs.sizes(stage, growing))
    manifest = {**about, "step": step, "world_size": collectives.world_size(), "logs": snapshot.logs}
    return partial(_commit, staging, final, snapshot, manifest, keep, group)


def _one_by_one(_: str, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in tensors:
        yield key, tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def _commit(
    staging: Path, final: Path, snapshot: Snapshot, manifest: dict[str, Any], keep: int, group: Any
) -> str | None:
    written = write(staging, snapshot)
    parts = collectives.gather_objects((written.digests, written.failure), group)
    failures = [failure for _, failure in parts if failure]
    if not failures and collectives.is_main():
        files = {name: digest for digests, _ in parts for name, digest in sorted(digests.items())}
        try:
            logs.sync(final.parents[1], [*snapshot.logs])
            manifests.write_manifest(staging / manifests.MANIFEST, manifest | {"files": files})
            shutil.rmtree(final, ignore_errors=True)
            os.rename(staging, final)
            disk.flush(final.parent)
        except OSError as error:
            failures = [str(error)]
    failures = collectives.gather_objects(failures, group)[0]
    if collectives.is_main():
        shutil.rmtree(staging, ignore_errors=True)
        if not failures:
            _delete_others(final, keep)
    collectives.gather_objects(None, group)  # the next save finds the directory as it is now
    return failures[0] if failures else None


def _made_anew(folder: Path) -> str:
    """Make an empty directory. Returns why that cannot be, if so."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        disk.make_directory(folder.parent)
        folder.mkdir()
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return ""


def _delete_others(newest: Path, keep: int) -> None:
    """All but the newest `keep` up to this one; those of later steps too, which were passed over as damaged."""
    folders = _newest_first(newest.parent)
    at = folders.index(newest)
    for other in [*folders[:at], *folders[at + keep :]]:
        shutil.rmtree(other, ignore_errors=True)


def _wait_for(folder: Path) -> None:
    end = time.monotonic() + VISIBLE_S
    while not folder.exists() and time.monotonic() < end:
        time.sleep(0.05)


def folder_of(stage: Path, step: int) -> Path:
    """Where the checkpoint of that step lies."""
    return stage / CHECKPOINTS / f"step-{step:08d}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was found whole."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def restore(self, state: Resumable, seed: int) -> None:
        """Set everything in `state` to what it was; every rank calls this together.

        The random sources are those of before only with as many ranks as before; else they are seeded anew.
        Raises: UserError if it holds something else than `state` needs.
        """
        try:
            self._restore(state, seed)
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{self.folder}: the stage cannot go on from it ({error!r}); add --overwrite to begin it again"
            ) from None

    def _restore(self, state: Resumable, seed: int) -> None:
        numbers = disk.read_json(self.folder / STATE)
        held = {*numbers, *(file.split(".rank-")[0] for file in self.manifest["files"])}
        for name in sorted({*state.numbers, *state.tensors} - held):  # of an option that was not set then
            console.say(f"note: {self.folder} has no {name}, which begins anew")
        for name, part in state.numbers.items():
            if name in numbers:
                part.load_state_dict(numbers[name])
        for name, tensors in state.tensors.items():
            if name in held:
                tensors.load_tensors(self._tensors(name))
        if self.manifest["world_size"] == collectives.world_size():
            random_sources.set_state(disk.read_json(self.folder / f"rng.rank-{collectives.rank()}.json"))
        else:
            torch.manual_seed((seed * 1_000_003 + self.step) * 4096 + collectives.rank())

    def _tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of all ranks that wrote, on every rank that reads; each file is read by one of them."""
        files = [file for file in sorted(self.manifest["files"]) if file.startswith(f"{name}.rank-")]
        for number, file in enumerate(files):
            reader = number % collectives.world_size()
            with safe_open(self.folder / file, framework="pt") as saved:
                for key in sorted(saved.keys()):
                    if collectives.rank() == reader:
                        tensor = saved.get_tensor(key).to(collectives.local_device())
                    else:
                        tensor = torch.empty(saved.get_slice(key).get_shape(), device=collectives.local_device())
                    collectives.broadcast(tensor, reader)
                    yield key, tensor


def newest(stage: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, the same on every rank; None if there is no checkpoint at all.

    Every file is compared with the manifest, each by one rank, before any is read. What is damaged is named and
    passed over.
    Raises: UserError if there are some and none is whole.
    """
    folders = collectives.gather_objects([str(folder) for folder in _newest_first(stage / CHECKPOINTS)])[0]
    for folder in map(Path, folders):
        _wait_for(folder)
        manifest, fault = _manifest(folder)
        names = sorted(manifest.get("files", {}))
        mine = names[collectives.rank() :: collectives.world_size()]
        fault = fault or next((fault for name in mine if (fault := _fault(folder, name, manifest))), "")
        faults = list(dict.fromkeys(filter(None, collectives.gather_objects(fault))))
        if not faults:
            stray = set(os.listdir(folder)) - {*names, manifests.MANIFEST}
            if stray:
                console.say(f"{folder}: ignored {', '.join(sorted(stray))}, which its manifest does not name")
            return Checkpoint(folder, manifest)
        console.say(f"warning, {folder} is passed over: {'; '.join(faults)}")
    if folders:
        raise UserError(
            f"{stage / CHECKPOINTS}: no checkpoint there is whole (see above); put one back, or add --overwrite to "
            "begin the stage again"
        )
    return None


def is_there(stage: Path) -> bool:
    """Whether the stage has checkpoints, whole or not."""
    return bool(_newest_first(stage / CHECKPOINTS))


def newest_manifest(stage: Path) -> Mapping[str, Any] | None:
    """What the newest checkpoint says it belongs to; no file of it is looked at."""
    return next((m for m, fault in map(_manifest, _newest_first(stage / CHECKPOINTS)) if not fault), None)


def require_room(stage: Path, need: int) -> None:
    """Raises: UserError if `need` bytes of checkpoints, those that are there included, do not fit on the disk."""
    there = sum(file.stat().st_size for file in (stage / CHECKPOINTS).rglob("*") if file.is_file())
    free = shutil.disk_usage(next(folder for folder in (stage, *stage.absolute().parents) if folder.exists())).free
    if need > free + there:
        raise UserError(
            f"{stage}: {console.size(free)} are free there, expected {console.size(need - there)} for the "
            "checkpoints of --keep and one being written; make room, or name another --output-dir"
        )


def sweep(stage: Path, everything: bool = False, but: int = 0) -> None:
    """Remove what a save that was cut off has left, or all checkpoints but the newest `but`. Nothing else."""
    folder = stage / CHECKPOINTS
    for left in [*folder.glob(".tmp-step-*"), *(_newest_first(folder)[but:] if everything else [])]:
        shutil.rmtree(left, ignore_errors=True)
    if everything and not folder.is_symlink():
        with contextlib.suppress(OSError):  # it is not there, or holds something of the user's
            folder.rmdir()


def _newest_first(folder: Path) -> list[Path]:
    """By the step in the name; clocks may jump. Raises: UserError if the directory cannot be read."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be read ({error.strerror}); mend that, or add --overwrite to begin the stage again"
        ) from None
    steps = [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]
    return [folder / f"step-{step:08d}" for step in sorted(steps, reverse=True)]


def _manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """The manifest and what is wrong with it."""
    path = folder / manifests.MANIFEST
    try:
        manifest = disk.read_json(path)
    except OSError as error:
        return {}, f"{path} cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return {}, f"{path} is no manifest ({error!r})"
    faulty = manifests.faulty_entries(manifest, KINDS)
    if faulty:
        return {}, f"{path} has no proper {faulty}"
    for name in manifest["files"]:
        if Path(name).name != name or not name.endswith((".safetensors", ".json")):
            return {}, f"{path} names the file {name!r}"
    return (manifest, "") if manifest["sha256"] == content_digest(manifest) else ({}, f"{path} differs from its sha256")


def _fault(folder: Path, name: str, manifest: Mapping[str, Any]) -> str:
    entry, path = manifest["files"][name], folder / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes, expected {entry['size']}"
        return "" if manifests.digest(path)["sha256"] == entry["sha256"] else f"{name} differs from its sha256"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
