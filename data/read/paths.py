"""Readers of records for a path: files, their URL, a directory saved by `datasets`, or a dataset on the hub."""

import glob
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from pydantic import ConfigDict, Field

from data.config import FILE_TYPES, SUFFIXES
from data.read.formats import LocatedRecords, read_records, suffix
from data.read.records import Skipped, without_padding
from data.read.remote import DataFile, RemoteFile, find_files, is_remote, refuse_failures
from rlhf.config import Config, suggest
from rlhf.errors import UserError
from rlhf.text.tokenizer import require_hub

T = TypeVar("T")
METADATA_FILES = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""files that `datasets` writes beside the data"""
HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
BUILDER = re.compile(rb"\b(?:GeneratorBased|ArrowBased|Dataset)Builder\b")
READ_ERRORS = (ValueError, LookupError, TypeError, AttributeError)
"""errors of reading a damaged directory"""
NO_PARTS = "files have no parts; name the files, for example by a pattern: 'data/train*'"
BATCH_ROWS = 256
"""rows of a saved dataset that are read at once; reading one at a time takes 14 us per row instead of 2"""


class TableConfig(Config):
    """Which part of a dataset on the hub, of a directory, or saved by `datasets`. A file has no parts."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # a split, a subset or a column may be named 2024

    split: str | None = None
    """split of the dataset; train, unless the source has a split for each phase. In a directory, names of files and
    directories tell the splits, as on the hub"""
    subset: str | None = None
    """configuration of the hub dataset, or of its clone"""
    data_dir: str | None = None
    """directory inside the hub dataset or a local directory, such as harmless-base"""
    group: str | None = Field(None, repr=False)
    """the group in which all rows of the path are evaluated: the value of a column `group`"""
    lines: bool = False
    """.txt files: each line is a document; otherwise empty lines separate documents"""
    streaming: bool = False
    """read a hub dataset row by row without storing it; requires max_train_rows, and uses the first rows"""


class RecordReader(Protocol):
    """The records of one path. The parts are a split and what `config` names."""

    def records(self, split: str, config: TableConfig) -> LocatedRecords:
        """(location, record) of every record; a Skipped replaces a record that cannot be read.

        Raises: UserError if nothing can be read, or the path has no such part.
        """
        ...

    def fingerprint(self, split: str, config: TableConfig) -> str:
        """A text that changes whenever the records change."""
        ...


def is_hub_id(path: str) -> bool:
    """Whether `path` is OWNER/NAME on the hub, or OWNER/NAME@REVISION, and not a local path."""
    match = HUB_ID.fullmatch(path)
    if ".." in re.split("[/@]", path):
        return False
    return bool(match) and suffix(Path(path)) not in SUFFIXES and not Path(match[1] if match else "").exists()


def open_path(path: str) -> RecordReader:
    """The reader for a path. Raises: UserError if the path is empty or does not exist, or a store fails."""
    if is_remote(path):
        return DataFiles(path, tuple(_remote_files(path)))
    if not path:
        raise UserError(f"got no path, expected a file ({FILE_TYPES}), a directory, or OWNER/NAME on the hub")
    match = HUB_ID.fullmatch(path)
    if match and is_hub_id(path):
        return HubDataset(path, match[1], match[2])
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file() or all((folder / name).is_file() for name in METADATA_FILES[1::2]):
        return SavedDataset(path, folder)
    if folder.is_dir():
        data_files(path)
        return DataDirectory(path, folder)
    return DataFiles(path, tuple(data_files(path)))


def _remote_files(url: str) -> list[RemoteFile]:
    files = [file for file in find_files(url) if suffix(file) in SUFFIXES]
    if not files:
        cure = f"for the files of a directory write a pattern, such as {url.rstrip('/')}/*.jsonl"
        raise UserError(f"{url}: no such data file, expected {FILE_TYPES}; {cure}")
    return files


def data_files(path: str) -> list[Path]:
    """The file at `path`, or the data files that match a pattern or lie in a directory, sorted.

    Hidden files are left out. So are a directory's .txt files, if it has data files of another type: they are often a
    licence.
    Raises: UserError if there is no data file.
    """
    local = Path(path).expanduser()
    if local.is_file():
        refuse_loading_script(path)
        if suffix(local) not in SUFFIXES:
            raise UserError(f"{path}: got a '{suffix(local)}' file, expected {FILE_TYPES}")
        return [local]
    if local.is_dir():
        files = list(_data_files_in(local))
        files = [file for file in files if suffix(file) != ".txt"] or files
        got = "a directory without data files"
    elif glob.has_magic(path):
        matches = [Path(name) for name in glob.glob(str(local), recursive=True)]
        candidates = [file for match in matches for file in (_data_files_in(match) if match.is_dir() else [match])]
        files = [file for file in candidates if suffix(file) in SUFFIXES]
        got = "the pattern matches no data file"
    else:
        files, got = [], "no such file or directory"
    if not files:
        raise UserError(f"{path}: {got}; expected {FILE_TYPES}")
    return sorted(set(files))


def refuse_loading_script(path: str) -> None:
    """Raises: UserError if `path` is a Python file with which `datasets` once loaded a dataset. Does not run it."""
    file = Path(path).expanduser()
    if file.suffix == ".py" and file.is_file() and BUILDER.search(file.read_bytes()):
        cure = f"give the files it reads, or the hub's conversion: OWNER/NAME@{PARQUET_REVISION}"
        raise UserError(f"{path}: {LOADING_SCRIPT} {cure}")


PARQUET_REVISION = "refs/convert/parquet"
LOADING_SCRIPT = "got a loading script of `datasets`, which is code and no longer run;"


def _data_files_in(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if suffix(file) in SUFFIXES and not hidden and file.name not in METADATA_FILES and file.is_file():
            yield file


def _digest(options: object, files: Iterable[DataFile]) -> str:
    """The sha256 of `options` and of the suffix and content of each file."""
    digest = hashlib.sha256((repr(options) + _later(options)).encode())
    for file in files:
        digest.update(suffix(file).encode() + (file.digest() if isinstance(file, RemoteFile) else _file_digest(file)))
    return digest.hexdigest()


def _later(options: object) -> str:
    """The options that came after the first runs, where they are set. Their `repr` is off: with it every earlier run
    would be one of other data."""
    configs = [x for x in (options if isinstance(options, tuple) else (options,)) if isinstance(x, TableConfig)]
    values = [(name, field, getattr(x, name)) for x in configs for name, field in type(x).model_fields.items()]
    return "".join(f" {name}={x!r}" for name, field, x in values if not field.repr and x != field.default)


def _file_digest(path: Path) -> bytes:
    with refuse_failures(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Data files on a disk, in an object store or on a web server. They have no splits."""

    name: str
    files: tuple[DataFile, ...]

    def records(self, split: str, config: TableConfig) -> LocatedRecords:
        _refuse_options(self.name, config, ("split", "subset", "data_dir"), NO_PARTS)
        for file in self.files:
            yield from read_records(file, config.lines)

    def fingerprint(self, split: str, config: TableConfig) -> str:
        return _digest(config, self.files)


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """A directory of data files. Its splits, directories and subsets are those that `datasets` finds, as on the hub.

    The files are read by our own readers, whose errors name file and line.
    """

    name: str
    folder: Path

    def records(self, split: str, config: TableConfig) -> LocatedRecords:
        files, left_out = self._files(split, config)
        for file in left_out:
            yield str(file), Skipped(f"file of no split: {file.relative_to(self.folder)}")
        for file in files:
            yield from read_records(file, config.lines)

    def fingerprint(self, split: str, config: TableConfig) -> str:
        return _digest(config, self._files(split, config)[0])

    def _files(self, split: str, config: TableConfig) -> tuple[list[Path], list[Path]]:
        """(the files of the split, those of no split). Without names of splits, all files are of any split."""
        import datasets

        root = _subdirectory(self.name, self.folder, config.data_dir)
        # `datasets` resolves the directory, and no file in it: in the hub's cache each is a link to a blob
        files = {str(root.resolve() / file.relative_to(root)): file for file in data_files(str(root))}
        cure = f"name its files by a pattern, such as {self.name}/*.jsonl"
        builder = _load(datasets.load_dataset_builder, str(self.folder), self.name, config, cure)
        listed = {str(name): sorted({*map(str, paths)} & {*files}) for name, paths in builder.config.data_files.items()}
        splits = {name: [files[path] for path in paths] for name, paths in listed.items() if paths}
        left_out = [file for file in files.values() if file not in {*chain(*splits.values())}]
        if [*splits] == ["train"]:
            suffixes = {suffix(file) for file in splits["train"]}
            if left_out and not suffixes & {suffix(file) for file in left_out}:
                got = f"{left_out[0].relative_to(self.folder)} beside {', '.join(suffixes)} files"
                raise UserError(f"{self.name}: got {got}, expected files of one format; {cure}")
            split = config.split or "train"
        return _choose_split(self.name, splits, split), left_out


@dataclass(frozen=True, slots=True)
class SavedDataset:
    """A directory written by `save_to_disk` of a Dataset or a DatasetDict."""

    name: str
    folder: Path

    def records(self, split: str, config: TableConfig) -> LocatedRecords:
        import datasets  # half a second, needed here only
        import pyarrow

        _refuse_options(self.name, config, ("subset", "data_dir"), "a saved dataset has splits only")
        with refuse_failures(self.name, *READ_ERRORS, pyarrow.ArrowException):
            saved = datasets.load_from_disk(str(self.folder))
            if isinstance(saved, datasets.DatasetDict):
                yield from _dataset_records(_choose_split(self.name, saved, split), f"{self.name}/{split}")
            else:
                _refuse_options(self.name, config, ("split",), "it was saved without splits")
                yield from _dataset_records(saved, self.name)

    def fingerprint(self, split: str, config: TableConfig) -> str:
        split_folder = self.folder / split
        paths = (split_folder if split_folder.is_dir() else self.folder).rglob("*")
        return _digest((split, config), sorted(path for path in paths if path.is_file()))


@dataclass(frozen=True, slots=True)
class HubDataset:
    """OWNER/NAME on the hub."""

    name: str
    hub_id: str
    revision: str | None = None

    def records(self, split: str, config: TableConfig) -> LocatedRecords:
        import datasets

        try:
            splits = self._load(datasets.load_dataset, config, streaming=config.streaming)
        except UserError:
            downloaded = self._downloaded()
            if downloaded is None:
                raise
            yield from downloaded.records(split, config)
            return
        rows = _choose_split(self.name, splits, split)
        location = f"{self.name}/{split}"
        with refuse_failures(location, ValueError, RuntimeError, datasets.exceptions.DatasetsError):
            if not config.streaming:
                yield from _dataset_records(rows, location)
            else:
                for number, record in enumerate(rows, 1):
                    yield f"{location}:{number}", without_padding(record)

    def fingerprint(self, split: str, config: TableConfig) -> str:
        """A digest with the builder's hash, which is the commit of a hub dataset."""
        import datasets

        try:
            commit = self._load(datasets.load_dataset_builder, config).hash
        except UserError:
            downloaded = self._downloaded()
            if downloaded is None:
                raise
            commit = downloaded.folder.name  # as the builder's hash
        return _digest((self.hub_id, commit, split, config), ())

    def _downloaded(self) -> DataDirectory | None:
        """The files that `hf download` has put into the hub's local cache, offline; None without data files there."""
        if not constants.HF_HUB_OFFLINE:
            return None
        try:
            folder = Path(
                snapshot_download(self.hub_id, repo_type="dataset", revision=self.revision, local_files_only=True)
            )
        except LocalEntryNotFoundError:
            return None
        return DataDirectory(self.name, folder) if any(_data_files_in(folder)) else None

    def _load(self, function: Callable[..., T], config: TableConfig, **options: object) -> T:
        """Call one of the loading functions of `datasets`. Raises: UserError, also if the hub does not answer."""
        require_hub(self.hub_id)
        cure = "download its files and give their path"
        return _load(function, self.hub_id, self.name, config, cure, revision=self.revision, **options)


def _subdirectory(name: str, folder: Path, data_dir: str | None) -> Path:
    """The directory `data_dir` inside `folder`. Raises: UserError if there is none."""
    if data_dir is None:
        return folder
    inside = folder / data_dir
    if Path(data_dir).is_absolute() or ".." in Path(data_dir).parts or not inside.is_dir():
        raise UserError(f"{name}: data_dir: got '{data_dir}', expected a directory in it")
    return inside


def _load(function: Callable[..., T], path: str, name: str, config: TableConfig, cure: str, **options: Any) -> T:
    """Call one of the loading functions of `datasets`. Raises: UserError if there is no such dataset or subset."""
    import datasets

    try:
        return function(path, name=config.subset, data_dir=config.data_dir, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        if "scripts are no longer supported" in reason:
            cure = f"read the hub's conversion, {path}@{PARQUET_REVISION}, or download its files"
            raise UserError(f"{name}: {LOADING_SCRIPT} {cure}") from None
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            cure = "check the name; if it is private or gated, log in: hf auth login"
        elif isinstance(error, ValueError):  # with the names of the subsets
            cure = f"choose a subset with subset=NAME, or {cure}"
        raise UserError(f"{name}: cannot be loaded: {reason}; {cure}") from None


def _refuse_options(name: str, config: TableConfig, options: Iterable[str], cure: str) -> None:
    for option in options:
        if getattr(config, option) is not None:
            raise UserError(f"{name}: got {option}={getattr(config, option)}, expected none: {cure}")


def _choose_split(name: str, splits: Mapping[str, T], split: str) -> T:
    if split not in splits:
        suggestion = suggest(split, list(splits))
        raise UserError(f"{name}: no split '{split}'; have {', '.join(splits)}{suggestion}; choose with split=NAME")
    return splits[split]


def _dataset_records(table: Any, location: str) -> LocatedRecords:
    table = table.with_format(None)
    for start in range(0, len(table), BATCH_ROWS):
        columns = table[start : start + BATCH_ROWS]
        for number, values in enumerate(zip(*columns.values(), strict=True), start + 1):
            yield f"{location}:{number}", without_padding(dict(zip(columns, values, strict=True)))
