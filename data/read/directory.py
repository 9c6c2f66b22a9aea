"""A directory of data files: its splits are those that `datasets` finds for a dataset on the hub.

So a clone of a hub dataset has the splits, directories and subsets of the hub dataset. The files are read by our own
readers, whose errors name file and line.
"""

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config import suggest
from rlhf.errors import UserError

CLONED_FROM = re.compile(r"^\s*url\s*=\s*\S*/datasets/([\w-][\w.-]*/[\w.-]+?)(?:\.git)?/?\s*$", re.MULTILINE)
"""the line of .git/config in a clone of a hub dataset"""
TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Splits:
    """The data files of a directory by split, sorted, and those that belong to no split."""

    files: Mapping[str, tuple[Path, ...]]
    left_out: tuple[Path, ...] = ()
    named: bool = True
    """whether names or the dataset's card divide the files; otherwise all of them are the split train"""


def cloned_from(folder: Path) -> str | None:
    """OWNER/NAME of the hub dataset of which a directory is a clone, or else its last two names."""
    config = folder / ".git" / "config"
    if config.is_file():
        match = CLONED_FROM.search(config.read_text(encoding="utf-8", errors="replace"))
        if match:
            return match[1]
    return "/".join(folder.absolute().parts[-2:]) if folder.is_dir() else None


def subdirectory(name: str, folder: Path, data_dir: str | None) -> Path:
    """The directory `data_dir` inside `folder`. Raises: UserError if there is none."""
    if data_dir is None:
        return folder
    inside = folder / data_dir
    if Path(data_dir).is_absolute() or ".." in Path(data_dir).parts or not inside.is_dir():
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        have = ", ".join(names) or "none"
        raise UserError(f"{name}: no directory '{data_dir}' in it{suggest(data_dir, names)}; have {have}")
    return inside


def splits_of(name: str, folder: Path, data_dir: str | None, subset: str | None, files: list[Path]) -> Splits:
    """The splits of `files`, the data files in `folder` or its directory `data_dir`.

    Raises: UserError if the directory has no such subset, or its card cannot be read.
    """
    from datasets.data_files import EmptyDatasetError, get_data_patterns, resolve_pattern  # half a second

    root = glob.escape(str((folder / (data_dir or "")).absolute()))  # it is the beginning of patterns
    patterns = _patterns_of_card(name, folder, subset) if data_dir is None or subset is not None else None
    try:
        patterns = get_data_patterns(root) if patterns is None else patterns
    except EmptyDatasetError:
        patterns = {}
    by_path = {str(file.absolute()): file for file in files}
    splits: dict[str, tuple[Path, ...]] = {}
    for split, own_patterns in patterns.items():
        matches: set[str] = set()
        for pattern in own_patterns:
            try:
                matches.update(resolve_pattern(pattern, root))
            except FileNotFoundError:
                continue
        if own_files := tuple(sorted(by_path[path] for path in matches if path in by_path)):
            splits[str(split)] = own_files
    if not splits or patterns == {TRAIN: ["**"]}:
        return Splits({TRAIN: tuple(files)}, named=False)
    divided = {file for own_files in splits.values() for file in own_files}
    return Splits(splits, tuple(file for file in files if file not in divided))


def _patterns_of_card(name: str, folder: Path, subset: str | None) -> dict[str, list[str]] | None:
    """The patterns of each split in the card's `configs` for the chosen or the default subset; None without them."""
    configs = _configs_of_card(name, folder)
    if subset is not None and subset not in configs:
        have = ", ".join(configs) or "none (its README.md has no 'configs')"
        raise UserError(f"{name}: no subset '{subset}'; have {have}{suggest(subset, list(configs))}")
    if not configs:
        return None
    default = configs.get_default_config_name()
    chosen = subset or default
    if chosen is None:
        raise UserError(f"{name}: has several subsets; choose one of {', '.join(configs)} with subset=NAME")
    config = configs[chosen]
    inside = config.get("data_dir")
    if "data_files" in config:
        from datasets.data_files import sanitize_patterns

        patterns = sanitize_patterns(config["data_files"])
    elif inside:
        from datasets.data_files import get_data_patterns

        patterns = get_data_patterns(glob.escape(str(subdirectory(name, folder, inside).absolute())))
    else:
        return None
    prefix = f"{inside}/" if inside else ""
    for pattern in (pattern for listed in patterns.values() for pattern in listed):
        if ":" in pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise UserError(f"{name}: README.md: names the file {pattern!r}, expected files in the same directory")
    return {str(split): [f"{prefix}{pattern}" for pattern in listed] for split, listed in patterns.items()}


def _configs_of_card(name: str, folder: Path) -> Any:
    """The subsets in the front matter of README.md, by name."""
    import yaml
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData

    card = folder / "README.md"
    try:
        data = DatasetCard.load(card).data if card.is_file() else DatasetCardData()
        configs = MetadataConfigs.from_dataset_card_data(data)
        configs.get_default_config_name()
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{name}: README.md: its dataset card cannot be read: {reason}; correct or remove it") from None
    return configs
