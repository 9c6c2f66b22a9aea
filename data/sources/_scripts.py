"""Datasets whose hub page is a loading script."""

from data.read.places import CONVERTED, Place, open_place
from rlhf.errors import UserError


def open_download(source: str, place: str, hub_ids: tuple[str, ...]) -> Place:
    """`open_place` of anything but the hub page itself, whose script `datasets` does not run; asks no network.

    Raises: UserError that says what to do instead.
    """
    if not place or place.casefold() in map(str.casefold, hub_ids):
        hub_id = place or hub_ids[0]
        raise UserError(
            f"{source}: {hub_id} ships a loading script, which `datasets` refuses to run; download its data files and "
            f"write {source}:PATH, or write {source}:{hub_id}@{CONVERTED} for the hub's conversion to parquet"
        )
    return open_place(place)
