"""Several places as one source of rows. A place is written `[source[,option=value]:]place`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.reading import SUFFIXES, Phase, Source, suffix
from rlhf import plugins
from rlhf.types import Row

FOLDER = "data.sources"


def parse_location(location: str) -> tuple[str, str]:
    """(plug-in spec, place) of one location: `hh_rlhf,split=test:DIR` is ('hh_rlhf,split=test', 'DIR').

    A file that exists, a data file by its ending, and OWNER/NAME on the hub go to the generic source `files`.
    """
    path = Path(location).expanduser()
    if location.endswith(".py"):
        return location, ""
    if path.is_file() or (path.is_dir() and location not in plugins.names(FOLDER)):
        return "files", location
    adapter = re.match(r"((?:[^:,]+\.py|\w+)(?:,[^:]*)?):(.*)", location, re.DOTALL)
    if adapter and not re.match(r"[A-Za-z]:[\\/]", location):
        return adapter[1], adapter[2]
    if suffix(path) in SUFFIXES or "/" in location.split(",")[0] or "\\" in location:
        return "files", location
    return location, ""


def open_sources(locations: Sequence[str]) -> "Mixture":
    """The rows of all `locations`, one after the other.

    Raises: UserError for an unknown source, a mistaken option or a place that is not there.
    """
    parsed = [parse_location(location) for location in locations]
    return Mixture(tuple(plugins.build(FOLDER, spec, place) for spec, place in parsed))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources one after the other; itself a source."""

    sources: tuple[Source, ...]

    def rows(self, phase: Phase) -> Iterator[Row]:
        for source in self.sources:
            yield from source.rows(phase)
