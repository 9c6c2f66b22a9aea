"""The score of a Python function of the user: `function(prompts, responses, **columns) -> scores`."""

import importlib
from typing import Any

import torch
from torch import Tensor

from rlhf import plugins
from rlhf.config import Config as Base
from rlhf.config import UserError
from rlhf.rewards import Context, Source, checked
from rlhf.types import Samples


class Config(Base):
    function: str
    """`file.py:function`, `module:function`, or `file.py` whose function is called score"""


def build(config: Config, context: Context) -> Source:
    """The function as a score source. `columns` holds, by name, the list of each column the rows have."""
    module_name, _, function_name = config.function.partition(":")
    function_name = function_name or "score"
    if module_name.endswith(".py"):
        module = plugins.load_file(module_name)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"reward '{config.function}': {error}; expected file.py:function or module:function") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward '{config.function}': no function '{function_name}' in {module_name}")

    def score(samples: Samples) -> Tensor:
        values = list(function(list(samples.prompts), list(samples.responses), **_columns(samples)))
        if len(values) != len(samples.responses):
            raise UserError(f"reward '{config.function}': got {len(values)} scores, expected {len(samples.responses)}")
        return checked(torch.tensor(values, dtype=torch.float32), samples, config.function).to(context.device)

    return score


def _columns(samples: Samples) -> dict[str, list[Any]]:
    names = {name for row in samples.rollout.rows for name in row.columns}
    return {name: [row.columns.get(name) for row in samples.rollout.rows] for name in sorted(names)}
