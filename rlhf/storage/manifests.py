"""The output of a stage: its models, and a manifest, written last, with the checksums of all files and of itself."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.shipped import PACKAGES, ROOT
from rlhf.storage import disk

T = TypeVar("T")
MANIFEST = "manifest.json"
RUN_CONFIG = "config.yaml"
WEIGHTS = (".safetensors", ".bin")
"""suffixes of files of weights"""
METRICS = "metrics.jsonl"
METRICS_VERSION = 1
"""Of metrics.jsonl, in the manifest of a stage. It rises when a row changes its form, or a name its meaning or unit, or
disappears; new names leave it as it is (docs/metrics.md)."""
FORMAT = 1
"""Of every manifest; those of before 2026-11-28 have none. It rises when other versions would misread one."""
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
CARD = ("README.md", "training.svg")
"""the model card in a model's folder, and its picture"""
CURE = "restore the file, rerun that stage with --overwrite, or name another directory"
PROGRAM = "rlhf-pipeline"
"""The name of this program among the versions; its version is a digest of its code."""
LIBRARIES = ("torch", "transformers", "deepspeed", "peft", "datasets", "accelerate")
MOST_MODELS = 8
"""models that an error lists"""


def file_digests(stage: Path, folders: list[str]) -> dict[str, Tree]:
    """Size and sha256 of every file in the stage's model folders, by path relative to the stage.

    Without the model cards, which people edit.
    """
    paths = (path for folder in folders for path in sorted((stage / folder).rglob("*")))
    files = (path for path in paths if path.is_file() and path.name not in CARD)
    return {str(f.relative_to(stage)): digest(f) for f in files}


def digest(path: Path) -> Tree:
    """Size and sha256 of a file."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    status = path.stat()
    return _sha256_of(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _sha256_of(path: Path, size: int, changed: int) -> str:
    """Cached: a stage checks its inputs several times, and they may have many gigabytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(manifest: Mapping[str, object]) -> str:
    """sha256 of a manifest's content without its entry `sha256`, which stores it; independent of the file's layout and
    of how a program writes numbers: 20.0 is 20."""
    return _digest_as_written(
        disk.with_leaves(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x, manifest)
    )


def _digest_as_written(manifest: Mapping[str, object]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, content: Mapping[str, object]) -> None:
    content = {"format": FORMAT, **content}
    disk.write_json(path, {**content, "sha256": content_digest(content)})


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of Python, the platform, and the libraries and the code that a result depends on."""
    code = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        code.update(path.read_bytes())
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES} | {PROGRAM: code.hexdigest()[:12]}
    return {"python": sys.version.split()[0], "platform": platform.platform(), **libraries}


def other_writer(manifest: Tree) -> str:
    """A clause for an error about a stage or a checkpoint that another version of this program has written."""
    same = manifest.get("versions", {}).get(PROGRAM) == versions()[PROGRAM]
    return "" if same else f"; another version of {PROGRAM} wrote it"


def require_writable(output_dir: str, stage: str = "") -> None:
    """Try to write in the output directory, and in the stage's folders that exist. Leaves no files.

    Raises: UserError if a directory cannot be created or written.
    """
    folder = Path(output_dir) / stage
    try:
        _try_to_write(folder)
        if os.path.lexists(folder / CHECKPOINTS):  # it may be a link to another disk
            _try_to_write(folder / CHECKPOINTS)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--output-dir {output_dir}: cannot write there ({reason}); name another directory") from None


def _try_to_write(folder: Path) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a directory")
    with tempfile.TemporaryFile(dir=existing):
        pass


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory for this process. It is created, and removed at the end if it is empty.

    The kernel releases the lock when the process ends in any way. Raises: UserError naming the process that has it.
    """
    created = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        file = _open_lock(directory)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise UserError(f"{directory / LOCK}: {reason}; make it writable, or choose another --output-dir") from None
    os.register_at_fork(after_in_child=file.close)  # a child that lives longer would keep the lock
    with file:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (directory / LOCK).unlink()
                for folder in created:
                    folder.rmdir()


def _open_lock(directory: Path) -> TextIO:
    """The lock file, open and locked, with the id of this process in it.

    Raises: UserError if another process has the lock; OSError.
    """
    while True:
        disk.make_directory(directory)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # a link would lead to another file
            file = os.fdopen(os.open(directory / LOCK, flags, 0o666), "a+", encoding="utf-8")
        except FileNotFoundError:  # its last owner has just removed the directory
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{directory}: in use by {file.read()}; wait for its end, or choose another --output-dir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            warning = f"warning: {directory} cannot be locked ({error.strerror}); let no other run write there"
            print(warning, file=sys.stderr, flush=True)
            return file
        if _is_same_file(file, directory / LOCK):
            break
        file.close()  # its last owner has removed it
    with contextlib.suppress(OSError):  # on a full disk the lock holds without the process id
        file.truncate(0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return file


def _is_same_file(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def read_manifest(stage: Path) -> Tree:
    """The manifest of a finished stage, after a check of every file that it lists.

    Raises: UserError if the stage is unfinished, the manifest was changed, or a file is missing or changed.
    """
    if not (stage / MANIFEST).is_file():
        raise UserError(f"{stage}: unfinished stage, no {MANIFEST}; run it to its end, or name another directory")
    manifest = _parsed(stage / MANIFEST)
    for name, entry in manifest["files"].items():
        fault = file_fault(stage / name, entry)
        if fault:
            raise UserError(f"{stage / name}: damaged, {fault}; {CURE}")
    return manifest


def _parsed(path: Path) -> Tree:
    """The manifest in a file. Raises: UserError if it is damaged or edited."""
    manifest, fault = parse(path)
    if fault:
        raise UserError(f"{path}: damaged or edited, {fault}; {CURE}")
    return manifest


def parse(path: Path) -> tuple[Tree, str]:
    """The manifest in a file; or an empty one, and why it is damaged: each has its own checksum.

    Raises: UserError if a version with another format wrote it.
    """
    try:
        manifest = disk.read_json(path)
    except OSError as error:
        return {}, f"it cannot be read ({error.strerror})"
    except ValueError as error:
        return {}, f"it is not a manifest ({' '.join(str(error).split())[:100]})"
    digests = [content_digest, _digest_as_written]  # the second: of before 2026-11-26
    if not isinstance(manifest, dict) or manifest.get("sha256") not in [digest(manifest) for digest in digests]:
        return {}, "its content differs from its own sha256"
    if manifest.get("format", FORMAT) != FORMAT:
        got = f"format {manifest['format']}, expected {FORMAT}"
        raise UserError(f"{path}: {got}: another version of {PROGRAM} wrote it; go on with that one")
    return manifest, ""


def file_fault(path: Path, entry: Tree) -> str:
    """How a file differs from its entry in a manifest; empty if it does not."""
    try:
        if not path.is_file():
            return "no such file"
        if path.stat().st_size != entry["size"]:
            return f"got {path.stat().st_size} bytes, expected {entry['size']}"
        return "" if _sha256(path) == entry["sha256"] else "its content differs from its sha256"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def stage_of(path: str) -> Path | None:
    """The stage directory that `path` names or lies in; None for a model that no stage made."""
    directory = Path(path)
    return next((folder for folder in (directory, directory.parent) if _is_stage(folder)), None)


def _is_stage(directory: Path) -> bool:
    """Whether a stage has written in the directory: its options and metrics are there, and no model's config."""
    files = {name for name in (RUN_CONFIG, METRICS, MANIFEST, "config.json") if (directory / name).is_file()}
    return RUN_CONFIG in files and len(files) > 1 and "config.json" not in files


def resolve_model_path(path: str, *folders: str) -> str:
    """The path to load a model from: in a stage directory the first of `folders` that exists, else `path` itself.

    Raises: UserError for an unfinished or damaged stage, or one that made none of `folders`.
    """
    path = os.path.expanduser(path)
    stage = stage_of(path)
    if stage is None:
        return path
    created = read_manifest(stage)["models"]
    if stage != Path(path):
        return path
    for folder in folders:
        if folder in created:
            return str(stage / folder)
    raise UserError(f"{stage}: holds {', '.join(created)}, expected {' or '.join(folders)}; name a model's directory")


def models_beneath(directory: Path) -> str:
    """`; have MODEL, ...` for an error about a directory that is no model but a stage's or a chain's; or nothing."""
    models = sorted(str(file.parent) for depth in ("*", "*/*") for file in directory.glob(f"{depth}/config.json"))
    return f"; have {', '.join(models[:MOST_MODELS])}" if models else ""


def planned_start(path: str, output_dir: str, planned: Mapping[str, T]) -> T | None:
    """If a planned stage will make the model at `path`: what `planned` has for it. Else None.

    planned: by name of the stage, what represents the model that it trains
    """
    directory = Path(path).resolve()
    for stage, start in planned.items():
        output = (Path(output_dir) / stage).resolve()
        if output in (directory, directory.parent):
            return start
    return None


def manifest_digest(path: str) -> str | None:
    """The checksum of the stage's manifest, which identifies an input of another stage; None for other models.

    Raises: UserError if that stage's manifest is damaged.
    """
    stage = stage_of(path)
    if stage is None or not (stage / MANIFEST).is_file():
        return None
    return str(_parsed(stage / MANIFEST)["sha256"])
