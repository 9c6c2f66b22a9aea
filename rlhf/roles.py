"""Which models a stage has: a table of roles, decided once, before anything is loaded.

Checks, plans, loading, manifests, the chain and its rehearsal walk the table; none of them asks the options for a
model. A stage makes its table in two steps: `named_roles` reads no file, so that it is there before the models are;
`roles` finds the models and decides what depends on them. Another model, such as a frozen teacher, is one more row.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.hub.short_names import resolve
from rlhf.storage.manifests import planned_start, resolve_model_path
from rlhf.text.tokenizer import load_tokenizer

Kind = Literal["lm", "scalar"]
"""A language model, or a backbone with one scalar per token."""
LoadTokenizer = Callable[[str], PreTrainedTokenizerBase]
"""Loads the tokenizer of the model at a path."""
FindTokenizer = Callable[[str], PreTrainedTokenizerBase | None]
"""The same for a plan. None: it is not on this machine."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a stage has a model for. Its parts are constants of the stage."""

    name: str
    """in plans and messages"""
    option: str
    """the option that names its model, and its name among the manifest's inputs"""
    folders: tuple[str, ...]
    """folders of an earlier stage that may hold its model; the first that there is counts"""
    kind: Kind
    options: Callable[[Any], EngineOptions | FrozenOptions] = lambda config: config
    """of the stage's options: those of a trained model, or of one that is used for inference only"""
    on_trunk_as: str = ""
    """the name of its adapter on a shared base model"""


@dataclass(frozen=True, slots=True)
class Role:
    """One model of a run."""

    part: Part
    path: str
    """where the model is; if a stage of the same command has still to make it, the model that this stage starts from"""
    options: EngineOptions | FrozenOptions
    adapter: str | None = None
    on_trunk: bool = False
    """whether it is an adapter on the base model of the stage's first role"""
    start: Part | None = None
    """the role from whose model it starts, with a new head if that has none; None: from a model of its own"""
    of: Part | None = None
    """the role whose model it is: it is not loaded, and has no memory; None: it is a model of its own"""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """models on which the result depends, by option, for the manifest. A critic that starts from the policy, because
    the reward model has another tokenizer, depends on that reward model, too"""
    planned: bool = False
    """whether a stage of the same command has still to make the model"""
    ids: tuple[int, int] | None = None
    """(ids of the tokenizer before this stage adds tokens, ids after it); None: no stage of this command adds any"""
    reason: str = ""
    """why the model is this one, where that is decided by other models"""

    @property
    def trained(self) -> bool:
        return isinstance(self.options, EngineOptions)


Planned = Mapping[str, Role]
"""Stages that run before this one, and the role that each trains."""
NO_PLANNED: Planned = {}


def locate(role: Role, output_dir: str, planned: Planned) -> Role:
    """The role with the path from which its model is loaded.

    Raises: UserError for an unfinished or damaged stage, or one that has no such model.
    """
    earlier = planned_start(role.path, output_dir, planned)
    if earlier is not None:
        ids = None if earlier.ids is None else (earlier.ids[1], earlier.ids[1])
        return replace(role, path=earlier.path, inputs=dict.fromkeys(role.inputs, earlier.path), planned=True, ids=ids)
    path = resolve_model_path(role.path, *role.part.folders)
    return replace(role, path=path, inputs=dict.fromkeys(role.inputs, path))


def inputs(table: Iterable[Role]) -> dict[str, str]:
    """The models on which the result of a run depends, by option."""
    return {option: path for role in table for option, path in role.inputs.items()}


def role_of(table: Iterable[Role], part: Part) -> Role | None:
    """The first role of a part, or None."""
    return next((role for role in table if role.part is part), None)


def with_options(table: Iterable[Role], config: Any) -> tuple[Role, ...]:
    """The same models with other options: a setting that a plan tries."""
    return tuple(replace(role, options=role.part.options(config)) for role in table)


def loaded(table: Sequence[Role]) -> tuple[Role, ...]:
    """The roles with a model of their own."""
    return tuple(role for role in table if role.of is None)


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at a path or with a short name. Raises: UserError."""
    return load_tokenizer(resolve(path))


def load_once() -> LoadTokenizer:
    """`tokenizer_of` that loads each tokenizer once."""
    return functools.cache(tokenizer_of)
