"""What a stage leaves behind: directories that appear whole, and a manifest, written last, that vouches for them."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config import UserError

MANIFEST = "manifest.json"
RUN_CONFIG = "config.yaml"
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
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def file_digests(stage: Path, folders: list[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file of the stage's model folders, by path relative to the stage."""
    files = (file for folder in folders for file in sorted((stage / folder).rglob("*")) if file.is_file())
    return {str(f.relative_to(stage)): {"size": f.stat().st_size, "sha256": _sha256(f)} for f in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Python, platform and the libraries a result depends on."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": sys.version.split()[0], "platform": platform.platform(), **found}


def read_manifest(stage: Path) -> dict[str, Any]:
    """The manifest of a finished stage, every file it names checked.

    Raises: UserError if the stage is unfinished, or a file is missing or changed since.
    """
    path = stage / MANIFEST
    if not path.is_file():
        raise UserError(f"{stage}: unfinished stage, no {MANIFEST}; run that stage to its end, or name another directory")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = manifest["files"].items()
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a manifest ({error!r}); run that stage again") from None
    for name, expected in files:
        file = stage / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["size"]:
            raise UserError(f"{file}: got {size} bytes, expected {expected['size']} as in {MANIFEST}; run that stage again")
        if _sha256(file) != expected["sha256"]:
            raise UserError(f"{file}: its content differs from {MANIFEST} (sha256); run that stage again")
    return manifest


def stage_of(place: str) -> Path | None:
    """The stage directory that `place` is or lies in; None for models from elsewhere."""
    directory = Path(place)
    for candidate in (directory, directory.parent):
        if candidate.is_dir() and ((candidate / MANIFEST).is_file() or (candidate / RUN_CONFIG).is_file()):
            return candidate
    return None


def model_place(place: str, folder: str) -> str:
    """Where to load a model from: a stage directory gives its `folder`, checked; everything else stays as it is.

    Raises: UserError for an unfinished or damaged stage.
    """
    stage = stage_of(place)
    if stage is None:
        return place
    read_manifest(stage)
    return str(stage / folder) if stage == Path(place) else place


def manifest_digest(place: str) -> str | None:
    """What identifies an input made by another stage; None for models from elsewhere."""
    stage = stage_of(place)
    return _sha256(stage / MANIFEST) if stage is not None and (stage / MANIFEST).is_file() else None
