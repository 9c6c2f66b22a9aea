"""Where the rows of a phase come from. A location is written `[source[,option=value]:]place[=weight]`."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.build.split import PHASES
from data.config import DataOptions
from data.read.contract import checked_rows
from data.read.places import is_hub_id, refuse_loading_script
from data.read.records import Phase, Skipped, Source
from rlhf import plugins
from rlhf.errors import UserError
from rlhf.types import Row

FOLDER = "data.sources"

LOCATION = re.compile(r"((?:[^:,]+\.py|[\w-]+)(?:,[^:]*)?)(?::(.*))?", re.DOTALL)
WEIGHTED = re.compile(r"(.+)=(\d+(?:\.\d*)?|\.\d+)", re.DOTALL)

Use = Literal["shared", "only", "evaluation"]


@dataclass(frozen=True, slots=True)
class Origin:
    """One location, opened. `use`: its rows are divided among the phases, serve this phase only, or are held out."""

    location: str
    source: Source
    use: Use = "shared"
    weight: float | None = None
    code: str = ""
    """digest of the Python file that the source is, if it is a user's own"""

    @property
    def streaming(self) -> bool:
        """Whether it is read only as far as needed, as it may have no end."""
        return self.source.streaming

    def rows(self, phase: Phase) -> Iterator[Row | Skipped]:
        """Raises: UserError if a source of the user's own gives something else than rows."""
        return checked_rows(self.source, phase, self.location) if self.code else self.source.rows(phase)


def parse_location(location: str) -> tuple[str, str, float | None]:
    """(plug-in spec, place, weight) of a location: `hh_rlhf,split=test:DIR=0.3` is ('hh_rlhf,split=test', 'DIR', 0.3).

    What is there, a path by its look, and OWNER/NAME on the hub go to the source that knows that dataset, else to the
    generic `files`; a bare word is a source (write ./demo for a directory of that name).
    """
    weighted = WEIGHTED.fullmatch(location)
    if weighted and not Path(location).exists() and not re.search(r"^[^:]*,[\w-]+$", weighted[1]):
        return *parse_location(weighted[1])[:2], float(weighted[2])
    path = Path(location).expanduser()
    match = LOCATION.fullmatch(location)
    windows = re.match(r"[A-Za-z]:[\\/]", location)
    there = path.exists() and path.suffix != ".py" and location not in plugins.names(FOLDER)
    if there or windows or not match:
        return source_for(location), location, None
    return match[1], match[2] or "", None


def source_for(place: str) -> str:
    """The source whose HUB_IDS name the dataset at `place`, else `files`."""
    if is_hub_id(place):
        hub_id = place.partition("@")[0].casefold()
        for name in plugins.names(FOLDER):
            if hub_id in map(str.casefold, plugins.find(FOLDER, name).HUB_IDS):
                return name
    return "files"


def open_origin(location: str, use: Use = "shared") -> Origin:
    """Raises: UserError for an unknown source, a mistaken option, a place that is not there, or no source at all."""
    spec, place, weight = parse_location(location)
    name = spec.partition(",")[0]
    refuse_loading_script(name)
    built: Source = plugins.build(FOLDER, spec, place)
    source = plugins.conforming(built, Source, location)
    code = hashlib.sha256(Path(name).read_bytes()).hexdigest() if name.endswith(".py") else ""
    return Origin(location, source, use, weight, code)


def origins(options: DataOptions, phase: Phase, own_places: bool = False) -> list[Origin]:
    """Every location that serves `phase`, but for those of weight 0; with `own_places` none that phases share.

    Raises: UserError if there is none, one cannot be opened, or only some of those to train on have a weight.
    """
    only: Sequence[str] = getattr(options, f"{phase}_only_data_path")
    shared = () if own_places else options.data_path
    if not shared and not only:
        raise UserError(f"{phase}: no data; name some with --data-path or --{phase}-only-data-path")
    train = [open_origin(place) for place in shared] + [open_origin(place, "only") for place in only]
    unweighted = [origin.location for origin in train if origin.weight is None]
    if 0 < len(unweighted) < len(train):
        raise UserError(
            f"{unweighted[0]}: got no weight beside weighted places; give every place one, or none: PLACE=0.5"
        )
    if train[0].weight is not None and not any(origin.weight for origin in train):
        raise UserError(f"{train[0].location}: got only weights of 0, expected one above 0")
    held_out = [open_origin(place, "evaluation") for place in options.eval_data_path]
    weighted = [origin.location for origin in held_out if origin.weight is not None]
    if weighted:
        raise UserError(f"--eval-data-path {weighted[0]}: got a weight, expected none: all its rows are for evaluation")
    return [origin for origin in train if origin.weight != 0] + held_out


def places_of_others(options: DataOptions, phase: Phase, own_places: bool = False) -> list[tuple[Phase, Origin]]:
    """Where other phases have prompts that the own places of `phase` leave to them, each with the phase it serves.

    These are the shared places, and the own places of earlier phases; with `own_places`, those of all other phases.
    """
    found: list[tuple[Phase, Origin]] = []
    for other in PHASES:
        earlier = own_places or PHASES.index(other) < PHASES.index(phase)
        only = getattr(options, f"{other}_only_data_path") if earlier else ()
        places = [open_origin(place) for place in options.data_path] + [open_origin(place, "only") for place in only]
        found += [(other, origin) for origin in places if other != phase and origin.weight != 0]
    return found
