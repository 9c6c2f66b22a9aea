"""What the cards of models and datasets on this machine say: hub ids and licences. No request is sent."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from huggingface_hub import metadata_load, try_to_load_from_cache

from rlhf.config import Tree
from rlhf.hub.short_names import resolve

TAG = "rlhf-pipeline"
"""tag of the models of this project"""
LOCAL_BASE = "local_base_model"
"""in a card's metadata: the name of the model that a chain started from, if that one has no hub id"""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SNAPSHOT = re.compile(r"/(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+/?$")
"""a directory of the hub's cache"""
LICENCE = re.compile(r"[\w.+-]{1,64}")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that a model was made from."""

    name: str
    hub_id: str | None
    licence: str | None
    datasets: tuple[str, ...] = ()
    """hub ids of the data of the earlier stages that made it"""


def card_metadata(path: str, kind: Literal["model", "dataset"]) -> Tree:
    """The metadata of the card in a directory, or in the hub's cache for OWNER/NAME; empty if it cannot be read."""
    file = Path(path).expanduser() / "README.md"
    if not file.parent.is_dir() and HUB_ID.fullmatch(path):
        cached = try_to_load_from_cache(path, "README.md", repo_type=kind)
        file = Path(cached) if isinstance(cached, str) else file
    try:
        if path and file.is_file():
            return metadata_load(file) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {}


def licence_of(metadata: Mapping[str, object]) -> str | None:
    """The licence of a card; None if it names none, or several."""
    licence = metadata.get("license")
    return licence if isinstance(licence, str) and LICENCE.fullmatch(licence) else None


def base_model(path: str) -> BaseModel:
    """The model at `path`: a hub id, a short name, a directory or a YAML file.

    A model that this project has made is no base of its own: its card names the model that it started from.
    """
    resolved = resolve(path)
    local = Path(resolved).expanduser()
    metadata = card_metadata(resolved, "model")
    licence = licence_of(metadata)
    if not local.exists():
        return BaseModel(resolved, resolved if HUB_ID.fullmatch(resolved) else None, licence)
    cached = SNAPSHOT.search(str(local))
    if cached:
        hub_id = f"{cached[1]}/{cached[2]}"
        return BaseModel(hub_id, hub_id, licence)
    start = metadata.get("base_model")
    tags = metadata.get("tags")
    if not isinstance(tags, list) or TAG not in tags:
        return BaseModel(local.name, None, licence)
    named = metadata.get("datasets")
    datasets = tuple(each for each in named if isinstance(each, str) and HUB_ID.fullmatch(each)) if named else ()
    if isinstance(start, str) and HUB_ID.fullmatch(start):
        return BaseModel(start, start, licence, datasets)
    name = metadata.get(LOCAL_BASE)
    return BaseModel(name if isinstance(name, str) else f"{local.parent.name}/{local.name}", None, licence, datasets)
