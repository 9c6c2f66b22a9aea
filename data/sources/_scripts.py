"""Datasets that the hub has only as a loading script."""

from data.read.paths import PARQUET_REVISION, RecordReader, is_hub_id, open_path
from rlhf.errors import UserError


def open_download(source: str, path: str, hub_ids: tuple[str, ...]) -> RecordReader:
    """Open a path that is not the hub dataset itself, whose script `datasets` does not run. Needs no network.

    Raises: UserError, with the cure, if `path` is empty or the hub dataset.
    """
    if not path or (is_hub_id(path) and path.casefold() in map(str.casefold, hub_ids)):
        hub_id = path or hub_ids[0]
        raise UserError(
            f"{source}: {hub_id} ships a loading script, which `datasets` refuses to run; download its data files and "
            f"write {source}:PATH, or write {source}:{hub_id}@{PARQUET_REVISION} for the hub's conversion to parquet"
        )
    return open_path(path)
