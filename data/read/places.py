"""Where records come from: files, a directory saved by `datasets`, or the hub."""

import contextlib
import difflib
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data.read.formats import SUFFIXES, Found, records, suffix
from rlhf.config import Config, suggest
from rlhf.errors import UserError
from rlhf.text.tokenizer import require_hub

KINDS = f"{', '.join(SUFFIXES)} (.gz too)"
HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
ABOUT_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""files that `datasets` writes beside the data"""
BUILDER = re.compile(rb"\b(?:GeneratorBased|ArrowBased|Dataset)Builder\b")
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""what reading a damaged directory raises"""
ROWS_AT_ONCE = 256
"""rows of a saved dataset that are in memory; one at a time takes 14 us a row instead of 2"""


class TableConfig(Config):
    """Which part of a dataset from the hub, or saved by `datasets`; other files have no parts."""

    split: str | None = None
    """split of the dataset; train unless the source has its own for each phase"""
    subset: str | None = None
    """configuration of the hub dataset"""
    data_dir: str | None = None
    """directory inside the hub dataset, such as harmless-base"""
    streaming: bool = False
    """read a hub dataset row by row without storing it; needs max_train_rows, and takes the first ones"""


class Place(Protocol):
    """What `open_place` found."""

    def records(self, split: str, config: TableConfig) -> Found:
        """(where, record) of every record; in place of one that cannot be read, why.

        Raises: UserError if the place as a whole cannot be read, or has no such part.
        """
        ...

    def fingerprint(self, split: str, config: TableConfig) -> str:
        """What changes whenever the records do."""
        ...


def is_hub_id(place: str) -> bool:
    """Whether `place` can only be meant as OWNER/NAME on the hub, or OWNER/NAME@REVISION."""
    match = HUB_ID.fullmatch(place)
    if ".." in re.split("[/@]", place):
        return False
    return bool(match) and suffix(Path(place)) not in SUFFIXES and not Path(match[1] if match else "").exists()


def open_place(place: str) -> Place:
    """Raises: UserError if nothing is there."""
    if not place:
        raise UserError(f"got no place, expected a file ({KINDS}), a directory, or OWNER/NAME on the hub")
    match = HUB_ID.fullmatch(place)
    if match and is_hub_id(place):
        return HubDataset(place, match[1], match[2])
    path = Path(place).expanduser()
    if (path / "dataset_dict.json").is_file() or all((path / name).is_file() for name in ABOUT_DATA[1::2]):
        return SavedDataset(place, path)
    return LocalFiles(place, tuple(data_files(place)))


def data_files(place: str) -> list[Path]:
    """The file at `place`, or the data files that a pattern matches or a directory holds, sorted.

    A directory's .txt files are documents only if it holds no data of another kind; hidden files are none.
    Raises: UserError if there is none.
    """
    path = Path(place).expanduser()
    if path.is_file():
        refuse_loading_script(place)
        if suffix(path) not in SUFFIXES:
            raise UserError(f"{place}: got a '{suffix(path)}' file, expected {KINDS}")
        return [path]
    if path.is_dir():
        files = list(_inside(path))
        files = [file for file in files if suffix(file) != ".txt"] or files
        what = "a directory without data files"
    elif glob.has_magic(place):
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        files = [
            file for one in found for file in (_inside(one) if one.is_dir() else [one]) if suffix(file) in SUFFIXES
        ]
        what = "the pattern matches no data file"
    else:
        files, what = [], f"no such file or directory{_nearest(path)}"
    if not files:
        raise UserError(f"{place}: {what}; expected {KINDS}")
    return sorted(set(files))


def refuse_loading_script(place: str) -> None:
    """Raises: UserError if `place` is a Python file that `datasets` once ran to load a dataset. Does not run it."""
    path = Path(place).expanduser()
    if path.suffix == ".py" and path.is_file() and BUILDER.search(path.read_bytes()):
        raise UserError(f"{place}: {_SCRIPT} give the files it reads, or the hub's conversion: OWNER/NAME@{CONVERTED}")


CONVERTED = "refs/convert/parquet"
_SCRIPT = "got a loading script of `datasets`, which is code and no longer run;"


def _inside(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if suffix(file) in SUFFIXES and not hidden and file.name not in ABOUT_DATA and file.is_file():
            yield file


def _nearest(path: Path) -> str:
    """` (did you mean 'data/train.jsonl'?)` for an existing path with a name like the first one that is not there."""
    parent = next((parent for parent in path.parents if parent.is_dir()), None)
    with contextlib.suppress(OSError):
        first, *rest = path.relative_to(parent or path).parts or ("",)
        near = difflib.get_close_matches(first, os.listdir(parent), n=1) if parent else []
        return f" (did you mean '{Path(parent or '', near[0], *rest)}'?)" if near else ""
    return ""


def _digest(what: object, files: Iterable[Path]) -> str:
    """Of a value's repr and the kind and content of files."""
    digest = hashlib.sha256(repr(what).encode())
    for path in files:
        with _told(str(path), OSError), path.open("rb") as file:
            digest.update(suffix(path).encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@contextlib.contextmanager
def _told(name: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of reading `name` into one line."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise UserError(f"{name}: cannot be read: {' '.join(str(error).split())[:300]}") from None


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Data files; they have no splits."""

    name: str
    files: tuple[Path, ...]

    def records(self, split: str, config: TableConfig) -> Found:
        cure = "files on disk have no parts; give the files you want, a pattern such as 'data/train*' perhaps"
        _refuse_parts(self.name, config, ("split", "subset", "data_dir"), cure)
        for file in self.files:
            yield from records(file)

    def fingerprint(self, split: str, config: TableConfig) -> str:
        return _digest(config, self.files)


@dataclass(frozen=True, slots=True)
class SavedDataset:
    """A directory that `save_to_disk` of a Dataset or a DatasetDict wrote."""

    name: str
    folder: Path

    def records(self, split: str, config: TableConfig) -> Found:
        import datasets  # half a second, needed here only
        import pyarrow

        _refuse_parts(self.name, config, ("subset", "data_dir"), "a saved dataset has splits only")
        self._refuse_other_folders()
        with _told(self.name, *DAMAGE, pyarrow.ArrowException):
            found = datasets.load_from_disk(str(self.folder))
            if isinstance(found, datasets.DatasetDict):
                yield from _table_records(_pick(self.name, found, split), f"{self.name}/{split}")
            else:
                _refuse_parts(self.name, config, ("split",), "it was saved without splits")
                yield from _table_records(found, self.name)

    def fingerprint(self, split: str, config: TableConfig) -> str:
        self._refuse_other_folders()
        part = self.folder / split
        inside = (part if part.is_dir() else self.folder).rglob("*")
        return _digest((split, config), sorted(file for file in inside if file.is_file()))

    def _refuse_other_folders(self) -> None:
        """Raises: UserError if a state.json names a file that is not beside it."""
        for path in sorted(self.folder.rglob("state.json")):
            with _told(self.name, *DAMAGE):
                names = [
                    str(entry["filename"]) for entry in json.loads(path.read_text(encoding="utf-8"))["_data_files"]
                ]
            for name in names:
                if Path(name).name != name or name == "..":
                    raise UserError(f"{path}: names {name!r}, expected files beside it")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """OWNER/NAME on the hub."""

    name: str
    hub_id: str
    revision: str | None = None

    def records(self, split: str, config: TableConfig) -> Found:
        import datasets

        found = self._ask(datasets.load_dataset, config, streaming=config.streaming)
        rows = _pick(self.name, found, split)
        where = f"{self.name}/{split}"
        with _told(where, OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError):
            if not config.streaming:
                yield from _table_records(rows, where)
            else:
                for number, record in enumerate(rows, 1):
                    yield f"{where}:{number}", record

    def fingerprint(self, split: str, config: TableConfig) -> str:
        """The hash of the builder: of a hub dataset, the commit."""
        import datasets

        builder = self._ask(datasets.load_dataset_builder, config)
        return _digest((self.hub_id, builder.hash, split, config), ())

    def _ask(self, load: Any, config: TableConfig, **options: Any) -> Any:
        """What one of the loading functions of `datasets` gives.

        Raises: UserError at once when the hub does not answer, or has no such dataset or subset.
        """
        import datasets

        try:
            require_hub(self.hub_id)
        except UserError as error:
            raise UserError(f"{error}{_nearest(Path(self.name))}") from None
        options |= {"name": config.subset, "data_dir": config.data_dir, "revision": self.revision}
        try:
            return load(self.hub_id, **options)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"{self.name}: {self._why(error, config)}") from None

    def _why(self, error: Exception, config: TableConfig) -> str:
        import datasets

        reason = " ".join(str(error).split())[:300]
        if "scripts are no longer supported" in reason:
            return f"{_SCRIPT} read the hub's conversion, {self.hub_id}@{CONVERTED}, or download its files"
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            return f"{reason} Check the name; if it is private or gated, log in: hf auth login"
        known: list[str] = []
        if isinstance(error, ValueError):
            with contextlib.suppress(OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError):
                known = datasets.get_dataset_config_names(self.hub_id, revision=self.revision)
        if config.subset is None and len(known) > 1:
            return f"has several subsets; choose one of {', '.join(known)} with subset=NAME"
        if known and config.subset not in (None, *known):
            return f"no subset '{config.subset}'; have {', '.join(known)}{suggest(str(config.subset), known)}"
        return f"cannot be loaded: {reason}; download its files and give their path"


def _refuse_parts(name: str, config: TableConfig, options: Iterable[str], why: str) -> None:
    for option in options:
        if getattr(config, option) is not None:
            raise UserError(f"{name}: got {option}={getattr(config, option)}, expected none: {why}")


def _pick(name: str, splits: Any, split: str) -> Any:
    if split not in splits:
        near = suggest(split, list(splits))
        raise UserError(f"{name}: no split '{split}'; have {', '.join(splits)}{near}; choose with split=NAME")
    return splits[split]


def _table_records(table: Any, where: str) -> Found:
    table = table.with_format(None)
    for start in range(0, len(table), ROWS_AT_ONCE):
        columns = table[start : start + ROWS_AT_ONCE]
        for number, values in enumerate(zip(*columns.values(), strict=True), start + 1):
            yield f"{where}:{number}", dict(zip(columns, values, strict=True))
