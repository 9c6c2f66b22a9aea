"""Several places as one source of rows. A place is written `[source[,option=value]:]place`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.reading import Phase, Source
from rlhf import plugins
from rlhf.types import Row

FOLDER = "data.sources"


LOCATION = re.compile(r"((?:[^:,]+\.py|[\w-]+)(?:,[^:]*)?)(?::(.*))?", re.DOTALL)


def parse_location(location: str) -> tuple[str, str]:
    """(plug-in spec, place) of one location: `hh_rlhf,split=test:DIR` is ('hh_rlhf,split=test', 'DIR').

    What is there, a path by its look, and OWNER/NAME on the hub go to the generic source `files`; a bare word is a
    source (write ./demo for a directory of that name).
    """
    path = Path(location).expanduser()
    match = LOCATION.fullmatch(location)
    windows = re.match(r"[A-Za-z]:[\\/]", location)
    there = path.exists() and path.suffix != ".py" and location not in plugins.names(FOLDER)
    if there or windows or not match:
        return "files", location
    return match[1], match[2] or ""


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
