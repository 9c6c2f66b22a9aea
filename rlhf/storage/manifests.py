"""What a stage leaves behind: its models, and a manifest, written last, that vouches for them and for itself."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rlhf.errors import UserError
from rlhf.storage import disk

MANIFEST = "manifest.json"
RUN_CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
CURE = "put back what it was, make that stage again with --overwrite, or name another directory"
LIBRARIES = ("torch", "transformers", "deepspeed", "peft", "datasets", "accelerate")
KINDS: Mapping[str, type] = {"stage": str, "inputs": dict, "config": dict, "files": dict, "sha256": str}
"""what every manifest has"""


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


def own_digest(manifest: Mapping[str, Any]) -> str:
    """sha256 of what a manifest says, however it is laid out; it stands in the manifest itself, under `sha256`."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def faulty_entries(manifest: Any, more: Mapping[str, type]) -> str:
    """The names of entries that a manifest lacks or that are of another kind; `more` are those of its own."""
    kinds = {**KINDS, **more}
    if not isinstance(manifest, dict):
        return ", ".join(sorted(kinds))
    faulty = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    for name, entries in (("files", ("size", "sha256")), ("inputs", ("manifest_sha256",))):
        values = manifest[name].values() if name not in faulty else ()
        if not all(isinstance(value, dict) and set(entries) <= set(value) for value in values):
            faulty.append(name)
    return ", ".join(sorted(faulty))


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    disk.write_json(path, {**content, "sha256": own_digest(content)})


def versions() -> dict[str, str]:
    """Python, platform and the libraries a result depends on."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": sys.version.split()[0], "platform": platform.platform(), **found}


def require_writable(output_dir: str, stage: str = "") -> None:
    """Leave nothing behind.

    Raises: UserError if no directory can be made, or nothing written, at `output_dir` or in what is there of `stage`.
    """
    folder = Path(output_dir) / stage
    try:
        _try_to_write(folder)
        if os.path.lexists(folder / CHECKPOINTS):  # a link to another disk will do
            _try_to_write(folder / CHECKPOINTS)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--output-dir {output_dir}: cannot write there ({reason}); name another") from None


def require_folders(stage: Path, names: Iterable[str]) -> None:
    """Raises: UserError for a folder of a stage's models that is a link."""
    for name in names:
        if (stage / name).is_symlink():
            raise UserError(
                f"{stage / name}: got a symbolic link, expected a directory, which is replaced as a whole; remove it "
                f"({stage} itself may be a link)"
            )


def _try_to_write(folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{there} is not a directory")
    with tempfile.TemporaryFile(dir=there):
        pass


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """The directory for this process alone; it is made, and removed again if it stays empty.

    The kernel frees it however the process ends. Raises: UserError naming the process that has it.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        file = _locked(directory)
    except OSError as error:
        raise UserError(
            f"{directory / LOCK}: cannot be written ({error.strerror}); mend that, or name another --output-dir"
        ) from None
    with file:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (directory / LOCK).unlink()
                for folder in made:
                    folder.rmdir()


def _locked(directory: Path) -> TextIO:
    """The lock file, open and locked, with our name in it. Raises: UserError if another process has it; OSError."""
    while True:
        disk.make_directory(directory)
        try:
            file = (directory / LOCK).open("a+", encoding="utf-8")
        except FileNotFoundError:  # its last owner has just removed the directory
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{directory}: in use by {file.read()}; wait for its end, or name another --output-dir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            said = f"warning: {directory} has no locks ({error.strerror}); let no other run write there"
            print(said, file=sys.stderr, flush=True)
            return file
        if _is_at(file, directory / LOCK):
            break
        file.close()  # its last owner has removed it
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        file.truncate(0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return file


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def read_manifest(stage: Path) -> dict[str, Any]:
    """The manifest of a finished stage, every file it names checked.

    Raises: UserError if the stage is unfinished, the manifest changed since, or a file is missing or changed.
    """
    path = stage / MANIFEST
    if not path.is_file():
        raise UserError(f"{stage}: unfinished stage, no {MANIFEST}; run it to its end, or name another directory")
    manifest = _own_manifest(path)
    for name, entry in manifest["files"].items():
        file = stage / name
        found = file.stat().st_size if file.is_file() else None
        if found != entry["size"]:
            got = "no such file" if found is None else f"got {found} bytes"
            raise UserError(f"{file}: damaged, {got}, expected {entry['size']} bytes as in {MANIFEST}; {CURE}")
        if _sha256(file) != entry["sha256"]:
            raise UserError(f"{file}: damaged, its content differs from {MANIFEST} (sha256); {CURE}")
    return manifest


def _own_manifest(path: Path) -> dict[str, Any]:
    """A manifest that says what it said when it was written, in whatever layout. Raises: UserError."""
    try:
        manifest = disk.read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: damaged, not a manifest ({reason}); {CURE}") from None
    faulty = faulty_entries(manifest, {"models": list, "metrics": dict})
    if faulty:
        raise UserError(f"{path}: damaged, has no proper {faulty}; {CURE}")
    if manifest["sha256"] != own_digest(manifest):
        raise UserError(f"{path}: damaged or edited, its content differs from its own sha256; {CURE}")
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
    """What identifies an input made by another stage; None for models from elsewhere.

    Raises: UserError if that stage's manifest is damaged.
    """
    stage = stage_of(place)
    if stage is None or not (stage / MANIFEST).is_file():
        return None
    return str(_own_manifest(stage / MANIFEST)["sha256"])
