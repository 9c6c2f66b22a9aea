"""The score of a Python function of the user: `function(prompts, responses, **columns) -> scores`."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf import plugins
from rlhf.config import Config as Base
from rlhf.errors import UserError
from rlhf.rewards import Context, Source, columns_of
from rlhf.types import Samples


class Config(Base):
    function: str
    """`file.py:function`, `module:function`, or `file.py` whose function is called score"""


def build(config: Config, context: Context) -> Source:
    """The function as a score source: lists of B prompts and responses in, B numbers out.

    The columns that the rows have are passed by name, each a list of B, as far as the function takes them; among them
    `reference`, the response that the data has (a demonstration, or the chosen side of a pair).
    Raises: UserError when scoring, if it takes a column that no row of the batch has and has no default for it.
    """
    function = _find(config.function)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    needed = _needed(list(parameters.values()))

    def score(samples: Samples) -> Tensor:
        found = columns_of(samples)
        missing = [name for name in needed if name not in found]
        if missing:
            raise UserError(
                f"reward '{config.function}': it takes '{missing[0]}', but the rows have {', '.join(found) or 'none'}; "
                f"if only some rows have it, give it a default: {missing[0]}=None"
            )
        columns = {name: column for name, column in found.items() if takes_all or name in parameters}
        values = _called(config.function, function, samples, columns)
        try:
            return torch.tensor([float(value) for value in values], device=context.device)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"reward '{config.function}': got {type(values).__name__}, expected a list of numbers ({error})"
            ) from None

    return score


def _called(place: str, function: Callable[..., Any], samples: Samples, columns: Mapping[str, list[Any]]) -> Any:
    """What the function returns. Raises: UserError with file, line, error and row, if it raises one itself."""

    def score(rows: slice) -> Any:
        own = {name: column[rows] for name, column in columns.items()}
        values = function(list(samples.prompts[rows]), list(samples.responses[rows]), **own)
        return list(values) if isinstance(values, Iterator) else values  # what is lazy fails here, not later

    with plugins.Blame() as blame:
        return score(slice(None))
    assert blame.error is not None
    row = _first_to_fail(score, len(samples.responses))
    said = "no row of them fails alone" if row is None else f"for prompt {samples.prompts[row][-80:]!r}"
    reply = "" if row is None else f", response {samples.responses[row][:80]!r}"
    raise UserError(
        f"reward '{place}': {plugins.where_it_failed(blame.error)}, {said}{reply}; mend the function and type the same "
        "command again"
    ) from blame.error


def _first_to_fail(score: Callable[[slice], Any], count: int) -> int | None:
    """The first of `count` rows for which the function fails alone, found by halves."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        with plugins.Blame() as blame:
            score(slice(low, middle))
        low, high = (low, middle) if blame.error is not None else (middle, high)
    with plugins.Blame() as blame:
        score(slice(low, high))
    return low if blame.error is not None else None


def _needed(parameters: list[inspect.Parameter]) -> list[str]:
    """Those after prompts and responses that have no default."""
    first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    return [
        p.name
        for p in parameters
        if p not in first and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
    ]


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
