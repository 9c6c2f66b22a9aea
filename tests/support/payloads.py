"""Files that run code where a careless reader opens them: the code makes a directory, which tells that it ran."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Payload:
    """Unpickled, it makes a directory."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.ran),)


class Nested:
    """Unpickled, it has torch unpickle bytes inside it, which torch does without any care."""

    def __init__(self, inner: bytes) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.inner,)


def saved_bytes(value: Any, folder: Path) -> bytes:
    """What torch.save makes of a value."""
    path = folder / "value.pt"
    torch.save(value, path)
    content = path.read_bytes()
    path.unlink()
    return content


def write_zipped(path: Path, state: dict[str, Tensor], ran: Path) -> None:
    torch.save({**state, "extra": Payload(ran)}, path)


def write_nested(path: Path, state: dict[str, Tensor], ran: Path) -> None:
    torch.save({**state, "extra": Nested(saved_bytes(Payload(ran), path.parent))}, path)


def write_legacy(path: Path, state: dict[str, Tensor], ran: Path) -> None:
    torch.save({**state, "extra": Payload(ran)}, path, _use_new_zipfile_serialization=False)


def write_plain(path: Path, state: dict[str, Tensor], ran: Path) -> None:
    path.write_bytes(pickle.dumps({**state, "extra": Payload(ran)}))


WRITERS: dict[str, Callable[[Path, dict[str, Tensor], Path], None]] = {
    "a zipped pickle": write_zipped,
    "torch's bytes inside a pickle": write_nested,
    "torch's old format": write_legacy,
    "a plain pickle": write_plain,
}


def evil_module(ran: Path) -> str:
    """Python source that runs when it is imported."""
    return f"import os\nos.mkdir({str(ran)!r})\nclass C: pass\ndef generate(*args, **kwargs): pass\n"


def weights_of(file: Path) -> dict[str, Tensor]:
    """Copies, which stay when the file is written over."""
    return {name: weight.clone() for name, weight in load_file(file).items()}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))
