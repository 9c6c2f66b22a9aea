"""One dataset a file: `Config`, `HUB_IDS` (the hub datasets that it reads) and `build(config, place)`, a `Source`.

A user's own file needs no `HUB_IDS`: it goes by its path.
"""

from data.read.records import Source as Source
