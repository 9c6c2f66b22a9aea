"""The score of a Python function of the user: `function(prompts, responses, **columns) -> scores`."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf import plugins
from rlhf.config import Config as Base
from rlhf.config import UserError
from rlhf.rewards import Context, Source
from rlhf.types import Samples


class Config(Base):
    function: str
    """`file.py:function`, `module:function`, or `file.py` whose function is called score"""


def build(config: Config, context: Context) -> Source:
    """The function as a score source: lists of B prompts and responses in, B numbers out.

    The columns that the rows have are passed by name, each a list of B, as far as the function takes them.
    """
    function = _find(config.function)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def score(samples: Samples) -> Tensor:
        columns = {name: column for name, column in _columns(samples).items() if takes_all or name in parameters}
        values = function(list(samples.prompts), list(samples.responses), **columns)
        try:
            return torch.tensor([float(value) for value in values], device=context.device)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"reward '{config.function}': got {type(values).__name__}, expected a list of numbers ({error})"
            ) from None

    return score


def _find(place: str) -> Callable[..., Any]:
    module_name, _, function_name = place.partition(":")
    function_name = function_name or "score"
    if module_name.endswith(".py"):
        module = plugins.load_file(module_name)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"reward '{place}': {error}; expected file.py:function or module:function") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward '{place}': no function '{function_name}' in {module_name}")
    return function


def _columns(samples: Samples) -> dict[str, list[Any]]:
    names = {name for row in samples.rollout.rows for name in row.columns}
    return {name: [row.columns.get(name) for row in samples.rollout.rows] for name in sorted(names)}
