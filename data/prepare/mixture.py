"""The origins of a phase's rows: what the options `--data-path` and the like name, opened.

A data path is written `[source[,option=value]:]path[=weight]`.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.config import DataOptions
from data.prepare.split import PHASES
from data.read.contract import checked_rows
from data.read.paths import is_hub_id, refuse_loading_script
from data.read.records import DataSource, Phase, Skipped
from data.read.remote import is_remote
from rlhf import plugins
from rlhf.errors import UserError
from rlhf.hub.cards import card_metadata, licence_of
from rlhf.types import Row

FOLDER = "data.sources"

DATA_PATH = re.compile(r"((?:[^:,]+\.py|[\w-]+)(?:,[^:]*)?)(?::(.*))?", re.DOTALL)
DATASET_INFO = re.compile(r"[^:]+\.json:[^:]+|(?:[^:]*/)?dataset_info\.json")
"""an entry of LLaMA-Factory's list of datasets"""
WEIGHTED = re.compile(r"(.+)=(\d+(?:\.\d*)?|\.\d+)", re.DOTALL)

ADDRESS_OPTION = re.compile(r"https://[^?]*\?(?:.*&)?[^=&]*$", re.DOTALL)
"""A web address up to the name of a value of its query: the number after `?page=` is no weight."""

CLONED_FROM = re.compile(r"^\s*url\s*=\s*\S*/datasets/([\w-][\w.-]*/[\w.-]+?)(?:\.git)?/?\s*$", re.MULTILINE)
"""the line of .git/config in a clone of a hub dataset"""

Use = Literal["shared", "only", "evaluation"]


@dataclass(frozen=True, slots=True)
class Origin:
    """One data path, opened. `use`: its rows are divided among the phases, serve one phase only, or are held out."""

    data_path: str
    source: DataSource
    use: Use = "shared"
    weight: float | None = None
    code: str = ""
    """digest of the source's Python file, if it is the user's own; else empty"""

    @property
    def streaming(self) -> bool:
        """Whether the rows are read only as far as needed, because there may be no last one."""
        return self.source.streaming

    def rows(self, phase: Phase) -> Iterator[Row | Skipped]:
        """The rows for one phase. Raises: UserError if a user's own source yields something other than rows."""
        return checked_rows(self.source, phase, self.data_path) if self.code else self.source.rows(phase)


def parse_data_path(data_path: str) -> tuple[str, str, float | None]:
    """(plug-in spec, path, weight) of a data path: `hh_rlhf,split=test:DIR=0.3` is ('hh_rlhf,split=test', 'DIR', 0.3).

    Existing paths and OWNER/NAME on the hub belong to the source that reads that dataset, else to the
    generic source `files`. FILE.json:NAME is an entry of LLaMA-Factory's dataset_info.json. A single word is a source
    (write ./demo for a directory of that name).
    """
    weighted = WEIGHTED.fullmatch(data_path)
    is_option = weighted and (re.search(r"^[^:]*,[\w-]+$", weighted[1]) or ADDRESS_OPTION.search(weighted[1]))
    if weighted and not is_option and not Path(data_path).exists():
        return *parse_data_path(weighted[1])[:2], float(weighted[2])
    if DATASET_INFO.fullmatch(data_path) and not (":" in data_path and Path(data_path).exists()):
        return "llama_factory", data_path, None
    path = Path(data_path).expanduser()
    match = DATA_PATH.fullmatch(data_path)
    is_local = path.exists() and path.suffix != ".py" and data_path not in plugins.names(FOLDER)
    if is_local or is_remote(data_path) or not match:
        return find_source(data_path), data_path, None
    return match[1], match[2] or "", None


def _cloned_from(folder: Path) -> str | None:
    """OWNER/NAME of the hub dataset of which a directory is a clone, or else its last two names."""
    config = folder / ".git" / "config"
    if config.is_file():
        match = CLONED_FROM.search(config.read_text(encoding="utf-8", errors="replace"))
        if match:
            return match[1]
    return "/".join(folder.absolute().parts[-2:]) if folder.is_dir() else None


def find_source(path: str) -> str:
    """The source whose HUB_IDS list the hub dataset at `path`, or the one that it is a clone of; else `files`."""
    hub_id = path.partition("@")[0] if is_hub_id(path) else _cloned_from(Path(path).expanduser())
    if hub_id is not None:
        hub_id = hub_id.casefold()
        for name in plugins.names(FOLDER):
            if hub_id in map(str.casefold, plugins.find(FOLDER, name).HUB_IDS):
                return name
    return "files"


def hub_id(data_path: str) -> str | None:
    """OWNER/NAME of the hub dataset that a data path reads; None for other data."""
    spec, path, _ = parse_data_path(data_path)
    if path:
        return path.partition("@")[0] if is_hub_id(path) else None
    name = spec.partition(",")[0]
    known = () if name.endswith(".py") else plugins.find(FOLDER, name).HUB_IDS
    return str(known[0]) if known else None


def licence(data_path: str) -> str | None:
    """The licence that the card of a data path's dataset names, if the card is on this machine."""
    return licence_of(card_metadata(hub_id(data_path) or parse_data_path(data_path)[1], "dataset"))


def open_origin(data_path: str, use: Use = "shared") -> Origin:
    """Open a data path. Raises: UserError for an unknown source or option, or a path that does not exist."""
    spec, path, weight = parse_data_path(data_path)
    name = spec.partition(",")[0]
    refuse_loading_script(name)
    source: DataSource = plugins.build(FOLDER, spec, path)
    source = plugins.conforming(source, DataSource, data_path)
    code = hashlib.sha256(Path(name).read_bytes()).hexdigest() if name.endswith(".py") else ""
    return Origin(data_path, source, use, weight, code)


def origins(options: DataOptions, phase: Phase, own_data_only: bool = False) -> list[Origin]:
    """The origins that serve `phase`, without those of weight 0; with `own_data_only` also without shared ones.

    Raises: UserError if there is none, one cannot be opened, or only some training origins have a weight.
    """
    only: Sequence[str] = getattr(options, f"{phase}_only_data_path")
    shared = () if own_data_only else options.data_path
    if not shared and not only:
        raise UserError(f"{phase}: no data; name some with --data-path or --{phase}-only-data-path")
    train = [open_origin(path) for path in shared] + [open_origin(path, "only") for path in only]
    unweighted = [origin.data_path for origin in train if origin.weight is None]
    if 0 < len(unweighted) < len(train):
        raise UserError(
            f"{unweighted[0]}: got no weight beside weighted paths; give all of them a weight, or none: PATH=0.5"
        )
    held_out = [open_origin(path, "evaluation") for path in options.eval_data_path]
    return [origin for origin in train if origin.weight != 0] + held_out


def origins_of_other_phases(
    options: DataOptions, phase: Phase, own_data_only: bool = False
) -> list[tuple[Phase, Origin]]:
    """The origins whose prompts the own data paths of `phase` must not train on, each with the phase that it serves.

    These are the shared ones, and the own ones of earlier phases; with `own_data_only`, of all other phases.
    """
    origins: list[tuple[Phase, Origin]] = []
    for other_phase in PHASES:
        earlier = own_data_only or PHASES.index(other_phase) < PHASES.index(phase)
        only = getattr(options, f"{other_phase}_only_data_path") if earlier else ()
        other_origins = [open_origin(path) for path in options.data_path] + [open_origin(path, "only") for path in only]
        origins += [(other_phase, origin) for origin in other_origins if other_phase != phase and origin.weight != 0]
    return origins
