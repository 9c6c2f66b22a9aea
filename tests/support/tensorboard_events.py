"""What TensorBoard shows of a folder, read by the reader that its server uses."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray


def shown(directory: Path) -> dict[str, list[tuple[int, Any]]]:
    """(step, number or text) of each tag."""
    events = EventAccumulator(str(directory), tensor_size_guidance={"scalars": 0, "text": 0}).Reload()
    return {
        tag.removesuffix("/text_summary"): [(e.step, _plain(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def _plain(array: Any) -> float | str:
    value = array.reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else float(value)
