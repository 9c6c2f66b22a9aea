"""The score of a user's Python function: `function(prompts, responses, **columns) -> scores`."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from rlhf import plugins
from rlhf.config import Config as Base
from rlhf.errors import UserError
from rlhf.rewards import Context, Function, Source, columns_of, columns_of_rows
from rlhf.types import Row, Samples

ANSWERS = "answers"
"""the parameter that gets the responses without the thoughts before them"""
DEFAULT = "score"
"""the function of a file that the spec names alone"""
EXPECTED = "function(prompts, responses, **columns)"
MISPLACED = (("responses", "completions"), ("prompts",))
"""names that the first parameter, which gets the prompts, and the second cannot have: those of TRL and OpenRLHF"""


class Config(Base):
    function: str
    """`file.py:function`, `module:function`, or `file.py` with a function `score`"""


def build(config: Config, context: Context) -> Source:
    """The function as a score source: lists of B prompts and responses in, B numbers out.

    The columns of the rows are passed by name, each a list of B, if the function has a parameter for them; one of them
    is `reference`, the response in the data (a demonstration, or the chosen side of a pair).
    Raises: UserError for a function that cannot be called as `rewards.Function`; when scoring, if a parameter without a
    default names a column that no row of the batch has.
    """
    function = _load_function(config.function)
    parameters = _parameters(config.function, function)
    takes_any_column = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    required = _required(list(parameters.values()))
    own = list(parameters)[:2]  # of the prompts and responses, whatever they are called

    def score(samples: Samples) -> Tensor:
        all_columns = columns_of(samples)
        if ANSWERS in parameters:
            all_columns = {ANSWERS: list(samples.answers), **all_columns}
        _require_columns(config.function, required, all_columns)
        columns = {
            name: column
            for name, column in all_columns.items()
            if name not in own and (takes_any_column or name in parameters)
        }
        values, numbers = _call(config.function, function, samples, columns), list[float]()
        try:
            if isinstance(values, Mapping | Set | str):
                raise TypeError("its items are not one for each response, in their order")
            for value in values:
                numbers.append(float(value))
        except (TypeError, ValueError, OverflowError) as error:
            is_list = isinstance(values, list | tuple) and len(numbers) < len(samples.responses)
            response = f" for response {samples.responses[len(numbers)][:80]!r}" if is_list else ""
            raise UserError(
                f"reward '{config.function}': got {type(values).__name__}, expected a list of numbers "
                f"({error}{response})"
            ) from None
        return torch.tensor(numbers, device=context.device)

    return score


def check_rows(config: Config, rows: Sequence[Row]) -> None:
    """Raises: UserError if a parameter without a default names a column that no row has."""
    function = _load_function(config.function)
    _require_columns(
        config.function, _required([*_parameters(config.function, function).values()]), columns_of_rows(rows)
    )


def _require_columns(spec: str, required: Iterable[str], columns: Mapping[str, object]) -> None:
    missing = [name for name in required if name not in columns and name != ANSWERS]
    if missing:
        raise UserError(
            f"reward '{spec}': it takes '{missing[0]}', but the rows have {', '.join(columns) or 'none'}; if only some "
            f"rows have it, give it a default: {missing[0]}=None"
        )


def _parameters(spec: str, function: Function) -> Mapping[str, inspect.Parameter]:
    """The function's parameters. Raises: UserError if it does not take prompts and responses by position."""
    signature = None
    try:
        signature = inspect.signature(function)
        signature.bind("prompts", "responses", **dict.fromkeys(_required(list(signature.parameters.values()))))
        if any(name in names for name, names in zip(signature.parameters, MISPLACED, strict=False)):
            raise TypeError("the prompts come first, then the responses")
    except (TypeError, ValueError) as error:  # ValueError: a function in C may not say what it takes
        name = spec.partition(":")[2] or DEFAULT
        raise UserError(f"reward '{spec}': got {name}{signature or ''}, expected {EXPECTED} ({error})") from None
    return signature.parameters


def _call(spec: str, function: Function, samples: Samples, columns: Mapping[str, list[Any]]) -> Any:
    """The function's result. Raises: UserError with file, line, error and row, if the function raises an exception."""

    def score(rows: slice) -> Any:
        columns_of_rows = {name: column[rows] for name, column in columns.items()}
        values = function(list(samples.prompts[rows]), list(samples.responses[rows]), **columns_of_rows)
        return list(values) if isinstance(values, Iterator) else values  # a generator runs here: its errors are caught

    with plugins.CatchUserCode() as caught:
        return score(slice(None))
    assert caught.error is not None
    row = _first_to_fail(score, len(samples.responses))
    cause = "no single row fails" if row is None else f"for prompt {samples.prompts[row][-80:]!r}"
    response = "" if row is None else f", response {samples.responses[row][:80]!r}"
    raise UserError(
        f"reward '{spec}': {plugins.error_location(caught.error)}, {cause}{response}; correct the function and run the "
        "same command again (with --allow-config-change to go on from a checkpoint)"
    ) from caught.error


def _first_to_fail(score: Callable[[slice], Any], count: int) -> int | None:
    """The first of `count` rows for which the function fails on its own, by bisection; None if there is no such row."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        with plugins.CatchUserCode() as caught:
            score(slice(low, middle))
        low, high = (low, middle) if caught.error is not None else (middle, high)
    with plugins.CatchUserCode() as caught:
        score(slice(low, high))
    return low if caught.error is not None else None


def _required(parameters: list[inspect.Parameter]) -> list[str]:
    """The names of parameters after prompts and responses that have no default."""
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    return [
        p.name
        for p in parameters
        if p not in positional and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
    ]


def _load_function(spec: str) -> Function:
    module_name, function_name = plugins.function_of(spec)
    function_name = function_name or DEFAULT
    if module_name.endswith(".py"):
        module = plugins.load_file(module_name)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"reward '{spec}': {error}; expected file.py:function or module:function") from None
    function: Function | None = getattr(module, function_name, None)
    if not callable(function):
        other = "" if ":" in spec else ", or Config and build(config, context)"
        raise UserError(f"reward '{spec}': no function '{function_name}' in {module_name}; expected {EXPECTED}{other}")
    return function
