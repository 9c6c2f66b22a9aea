"""Checkpoints of an unfinished stage: committed as a whole or not at all, checked before they are read.

    OUT/STAGE/checkpoints/step-00000012/
        manifest.json                         stage, options and data; size and sha256 of every file; written last
        state.json                            numbers that are no tensors
        NAME.rank-R.part-K.safetensors        whole tensors by name, each written by one rank
        rng.rank-R.json                       states of the random generators of rank R

A directory with that name is complete: it is written under another name, flushed to the disk, and renamed once all
ranks have succeeded. Any number of ranks under any ZeRO stage can read it. Nothing in it is ever executed.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf import console
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.distributed.rendezvous import VISIBLE_S, wait_until
from rlhf.errors import UserError
from rlhf.storage import disk, manifests
from rlhf.storage.manifests import CHECKPOINTS
from rlhf.training import logs, random_sources

STATE = "state.json"
PART_BYTES = 1 << 29
"""bytes of tensors that a rank collects for one file: the memory that saving needs"""
WRONG_CONTENT = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""what values of other types than a stage writes may raise"""


class Numbers(Protocol):
    """An object whose state is a few numbers, the same on every rank."""

    def state_dict(self) -> object:
        """The state as JSON values."""

    def load_state_dict(self, state: Any, /) -> None: ...


class Tensors(Protocol):
    """An object whose state is tensors."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that this rank writes, under names that no other rank uses. All ranks iterate together."""

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]], /) -> None:
        """Set the state from the tensors of all ranks. All ranks iterate together."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """The state from which a stage resumes, by name; an object may be in both."""

    numbers: Mapping[str, Numbers]
    tensors: Mapping[str, Tensors]
    logs: Sequence[str] = ()
    """patterns of the stage's files that grow line by line; a checkpoint records their lengths"""


def save(stage: Path, step: int, state: Resumable, about: Mapping[str, object], keep: int) -> str | None:
    """Commit a checkpoint of `step`, only then delete all but the newest `keep`; every rank calls this together.

    Returns None, or why the checkpoint could not be written: then nothing of it is left, and earlier ones stay.
    """
    final = folder_of(stage, step)
    staging = final.with_name(f".tmp-{final.name}")
    failure = collectives.gather_objects(_make_empty(staging) if collectives.is_main() else "")[0]
    if failure:
        return failure
    wait_until(staging.exists, VISIBLE_S)
    about = {**about, "step": step, "world_size": collectives.world_size(), "logs": logs.sizes(stage, state.logs)}
    return _commit(final, staging, state, about, keep)


def _commit(final: Path, staging: Path, state: Resumable, manifest: Tree, keep: int) -> str | None:
    reports = collectives.gather_objects(write(staging, state))
    failures = [failure for _, failure in reports if failure]
    if not failures and collectives.is_main():
        files = {name: digest for digests, _ in reports for name, digest in sorted(digests.items())}
        try:
            logs.sync(final.parents[1], [*manifest["logs"]])
            manifests.write_manifest(staging / manifests.MANIFEST, manifest | {"files": files})
            shutil.rmtree(final, ignore_errors=True)
            os.rename(staging, final)
            disk.flush(final.parent)
        except OSError as error:
            failures = [str(error)]
    failures = collectives.gather_objects(failures)[0]
    if collectives.is_main():
        shutil.rmtree(staging, ignore_errors=True)
        if not failures:
            _delete_except(final, keep)
    collectives.barrier()  # so that no rank starts the next save before
    return failures[0] if failures else None


def write(staging: Path, state: Resumable) -> tuple[dict[str, Tree], str]:
    """Write this rank's files. Returns their digests, and why one could not be written, or an empty string.

    After a failure nothing more is written, but the rank still takes part in the collectives.
    """
    digests: dict[str, Tree] = {}
    failure = ""
    for name, write_to in _files(state):
        if failure:
            continue
        try:
            digests[name] = write_file(staging / name, write_to)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(staging).free if staging.exists() else 0
            failure = (
                f"rank {collectives.rank()} cannot write {staging / name} ({error}); {free / 1e6:,.0f} MB are free "
                "there"
            )
    return digests, failure


def write_file(path: Path, write_to: Callable[[Path], object]) -> Tree:
    """Write one file to the disk. Returns its digest."""
    write_to(path)
    disk.flush(path)
    return manifests.digest(path)


def _files(state: Resumable) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """The files of this rank, and what writes each. All ranks iterate together."""
    rank = collectives.rank()
    numbers = {name: source.state_dict() for name, source in state.numbers.items()}  # some call collectives
    for name, source in state.tensors.items():
        for number, part in enumerate(_parts(source.tensors())):
            yield f"{name}.rank-{rank}.part-{number}.safetensors", partial(disk.save_tensors, part)
    yield f"rng.rank-{rank}.json", lambda path: disk.write_json(path, random_sources.state())
    if collectives.is_main():
        yield STATE, lambda path: disk.write_json(path, numbers)


def _parts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors in fp32 on the CPU, PART_BYTES or a little more at once. A part is emptied when the next
    one is asked for."""
    part: dict[str, Tensor] = {}
    size = 0
    for key, tensor in tensors:
        part[key] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        size += part[key].nbytes
        if size >= PART_BYTES:
            yield part
            part.clear()
            size = 0
    if part:
        yield part


def _make_empty(folder: Path) -> str:
    """Make an empty directory. Returns an error message, or an empty string."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        disk.make_directory(folder.parent)
        folder.mkdir()
    except OSError as error:
        return f"{folder} cannot be created ({error.strerror})"
    return ""


def _delete_except(newest: Path, keep: int) -> None:
    """Delete all checkpoints but the last `keep` up to `newest`; later ones were damaged and skipped."""
    folders = _newest_first(newest.parent)
    index = folders.index(newest)
    for folder in [*folders[:index], *folders[index + keep :]]:
        shutil.rmtree(folder, ignore_errors=True)


def describe_newest(stage: Path) -> str:
    """A clause for messages that names the newest checkpoint."""
    manifest = newest_manifest(stage)
    if manifest is None:
        return "there is no checkpoint"
    return f"the last checkpoint is {folder_of(stage, manifest['step'])}"


def folder_of(stage: Path, step: int) -> Path:
    """The directory of the checkpoint of a step."""
    return stage / CHECKPOINTS / f"step-{step:08d}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    folder: Path
    manifest: Tree

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def restore(self, state: Resumable, seed: int) -> None:
        """Set `state` from the checkpoint; every rank calls this together.

        The random generators are restored if the number of ranks is the same; otherwise they get new seeds.
        Raises: UserError if the checkpoint lacks something that `state` needs.
        """
        try:
            self._restore(state, seed)
        except (SafetensorError, OSError, *WRONG_CONTENT) as error:
            other = manifests.other_writer(self.manifest)
            cure = "add --overwrite to start the stage from scratch"
            raise UserError(f"{self.folder}: the stage cannot resume from it ({error!r}){other}; {cure}") from None

    def _restore(self, state: Resumable, seed: int) -> None:
        numbers = disk.read_json(self.folder / STATE)
        stored = {file.split(".rank-")[0] for file in self.manifest["files"]}
        # its option was not set then, or an older version wrote a half of it
        missing = ({*state.numbers} - {*numbers}) | ({*state.tensors} - stored)
        for name in sorted(missing):
            console.say(f"note: {self.folder} has no {name}, which starts from its initial state")
        for name in {*state.numbers} - missing:
            state.numbers[name].load_state_dict(numbers[name])
        for name, tensors in state.tensors.items():
            if name not in missing:
                tensors.load_tensors(self._tensors(name))
        if self.manifest["world_size"] == collectives.world_size():
            random_sources.set_state(disk.read_json(self.folder / f"rng.rank-{collectives.rank()}.json"))
        else:
            random_sources.seed(seed, self.step)

    def _tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint, on every rank; each file is read by one rank and broadcast."""
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
    """The newest undamaged checkpoint, the same on every rank; None if there is no checkpoint at all.

    Before a file is read, one rank compares it with the manifest. A damaged checkpoint is reported and skipped.
    Raises: UserError if all checkpoints are damaged.
    """
    folders = collectives.gather_objects([str(folder) for folder in _newest_first(stage / CHECKPOINTS)])[0]
    for folder in map(Path, folders):
        wait_until(folder.exists, VISIBLE_S)
        manifest, fault = _manifest(folder)
        names = sorted(manifest.get("files", {}))
        for name in names[collectives.rank() :: collectives.world_size()]:
            problem = manifests.file_fault(folder / name, manifest["files"][name])
            fault = fault or (f"{name}: {problem}" if problem else "")
        faults = list(dict.fromkeys(filter(None, collectives.gather_objects(fault))))
        if not faults:
            stray = set(os.listdir(folder)) - {*names, manifests.MANIFEST}
            if stray:
                console.say(f"{folder}: ignored {', '.join(sorted(stray))}, which its manifest does not name")
            return Checkpoint(folder, manifest)
        console.say(f"warning, {folder} is skipped: {'; '.join(faults)}")
    if folders:
        raise UserError(
            f"{stage / CHECKPOINTS}: all checkpoints there are damaged (see above); restore one, or add --overwrite to "
            "start the stage from scratch"
        )
    return None


def exist(stage: Path) -> bool:
    """Whether the stage has checkpoints, damaged or not."""
    return bool(_newest_first(stage / CHECKPOINTS))


def newest_manifest(stage: Path) -> Tree | None:
    """The manifest of the newest checkpoint; its other files are not checked."""
    return next((m for m, fault in map(_manifest, _newest_first(stage / CHECKPOINTS)) if not fault), None)


def require_room(stage: Path, needed: int) -> None:
    """Raises: UserError if `needed` bytes of checkpoints, existing ones included, do not fit on the disk."""
    folder = stage / CHECKPOINTS  # perhaps a link to another disk
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if needed > free + used:
        raise UserError(
            f"{stage}: {console.size(free)} are free there, expected {console.size(needed - used)} for the "
            "checkpoints of --keep and one more while it is written; free space, or choose another --output-dir"
        )


def sweep(stage: Path, everything: bool = False, keep: int = 0) -> None:
    """Remove what an interrupted save has left, or (`everything`) also all checkpoints but the newest `keep`."""
    folder = stage / CHECKPOINTS
    for path in [*folder.glob(".tmp-step-*"), *(_newest_first(folder)[keep:] if everything else [])]:
        shutil.rmtree(path, ignore_errors=True)
    if everything and not folder.is_symlink():
        with contextlib.suppress(OSError):  # it does not exist, or contains a file of the user's
            folder.rmdir()


def _newest_first(folder: Path) -> list[Path]:
    """Sorted by the step in the name, because clocks may jump."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []
    steps = [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]
    return [folder / f"step-{step:08d}" for step in sorted(steps, reverse=True)]


def _manifest(folder: Path) -> tuple[Tree, str]:
    """The manifest, and an error message if it is damaged, or names files that are not of its stage."""
    path = folder / manifests.MANIFEST
    manifest, fault = manifests.parse(path)
    if fault:
        return {}, f"{path}: {fault}"
    for name in (*manifest["logs"], *manifest["files"]):
        if Path(name).name != name:
            return {}, f"{path} names the file {name!r}"
    return manifest, ""
