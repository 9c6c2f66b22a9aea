"""What a stage leaves behind: directories that appear whole, and a manifest, written last, that vouches for them."""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.config import UserError

MANIFEST = "manifest.json"
RUN_CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
LOCK = ".lock"
LIBRARIES = ("torch", "transformers", "deepspeed", "peft", "datasets", "accelerate")


@contextlib.contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """A temporary sibling to write into; it becomes `directory` when the block ends well, and is removed otherwise."""
    staging = directory.with_name(f".tmp-{directory.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or which names a directory has."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def file_digests(stage: Path, folders: list[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file of the stage's model folders, by path relative to the stage."""
    files = (file for folder in folders for file in sorted((stage / folder).rglob("*")) if file.is_file())
    return {str(f.relative_to(stage)): digest(f) for f in files}


def digest(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    known = path.stat()
    return _sha256_of(path.resolve(), known.st_size, known.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _sha256_of(path: Path, size: int, changed: int) -> str:
    """Read once a process: a stage looks at its inputs several times, and they may have many gigabytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Python, platform and the libraries a result depends on."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": sys.version.split()[0], "platform": platform.platform(), **found}


def require_writable(output_dir: str) -> None:
    """Leave nothing behind. Raises: UserError if no directory can be made, or nothing written, at `output_dir`."""
    place = Path(output_dir)
    try:
        there = next(path for path in (place, *place.absolute().parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise NotADirectoryError(0, f"{there} is not a directory")
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"--output-dir {output_dir}: cannot write there ({error.strerror}); name another") from None


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """The directory for this process alone; the kernel gives it free however the process ends.

    Raises: UserError naming the process that has it.
    """
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{directory}: in use by {file.read()}; wait for its end, or name another --output-dir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def read_manifest(stage: Path) -> dict[str, Any]:
    """The manifest of a finished stage, every file it names checked.

    Raises: UserError if the stage is unfinished, or a file is missing or changed since.
    """
    path = stage / MANIFEST
    if not path.is_file():
        raise UserError(f"{stage}: unfinished stage, no {MANIFEST}; run it to its end, or name another directory")
    cure = "make that stage again with --overwrite, or name another directory"
    try:
        manifest = read_json(path)
        files = {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
        missing = {"stage", "inputs", "models", "metrics", "config"} - set(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged, not a manifest ({error!r}); {cure}") from None
    if missing:
        raise UserError(f"{path}: damaged, has no {', '.join(sorted(missing))}; {cure}")
    for name, (size, digest) in files.items():
        file = stage / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            got = "no such file" if found is None else f"got {found} bytes"
            raise UserError(f"{file}: damaged, {got}, expected {size} bytes as in {MANIFEST}; {cure}")
        if _sha256(file) != digest:
            raise UserError(f"{file}: damaged, its content differs from {MANIFEST} (sha256); {cure}")
    return dict(manifest)


def stage_of(place: str) -> Path | None:
    """The stage directory that `place` is or lies in; None for models from elsewhere."""
    directory = Path(place)
    return next((path for path in (directory, directory.parent) if _is_stage(path)), None)


def _is_stage(directory: Path) -> bool:
    """Whether a stage has begun to write there: it leaves its options, its record, and no model's config."""
    has = {name for name in (RUN_CONFIG, METRICS, MANIFEST, "config.json") if (directory / name).is_file()}
    return RUN_CONFIG in has and len(has) > 1 and "config.json" not in has


def model_place(place: str, *folders: str) -> str:
    """Where to load a model from: of a stage directory the first of `folders` it made; other places stay as they are.

    Raises: UserError for an unfinished or damaged stage, or one that made none of `folders`.
    """
    stage = stage_of(place)
    if stage is None:
        return place
    made = read_manifest(stage)["models"]
    if stage != Path(place):
        return place
    for folder in folders:
        if folder in made:
            return str(stage / folder)
    raise UserError(f"{stage}: holds {', '.join(made)}, expected {' or '.join(folders)}; name a model's directory")


def planned_start(place: str, output_dir: str, planned: Mapping[str, str]) -> str | None:
    """The model that the maker of `place` starts from, if one of the `planned` stages is yet to make what is there."""
    here = Path(place).resolve()
    for stage, start in planned.items():
        made = (Path(output_dir) / stage).resolve()
        if made in (here, here.parent):
            return start
    return None


def manifest_digest(place: str) -> str | None:
    """What identifies an input made by another stage; None for models from elsewhere."""
    stage = stage_of(place)
    return _sha256(stage / MANIFEST) if stage is not None and (stage / MANIFEST).is_file() else None
