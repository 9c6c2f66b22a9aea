"""Parameter-efficient methods: one file each, with `Config`, `build(config, model)`, `merged_state(model, state)`."""

from typing import Any

from rlhf import plugins


def wrap(model: Any, spec: str | None) -> Any:
    """`model` with the adapter that `spec` names, or as it is."""
    return model if spec is None else plugins.build("rlhf.adapters", spec, model)
