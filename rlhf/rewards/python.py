"""The score of a user's Python function: `function(prompts, responses, **columns) -> scores`, or one that was written
for TRL, verl or OpenRLHF."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import FrameType
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from rlhf import plugins
from rlhf.config import Config as Base
from rlhf.errors import UserError
from rlhf.rewards import NO_SCORE, Context, Source, columns_of, columns_of_rows
from rlhf.rewards._conventions import Columns, convention_of
from rlhf.types import Row, Samples

ANSWERS = "answers"
"""the parameter that gets the responses without the thoughts before them"""
DEFAULT = "score"
"""the function of a file that the spec names alone"""
EXPECTED = "function(prompts, responses, **columns)"
MISPLACED = (("responses",), ("prompts",))
"""names that the first parameter, which gets the prompts, and the second cannot have"""


class Config(Base):
    function: str
    """`file.py:function`, `module:function`, or `file.py` with a function `score`"""
    messages: bool | None = None
    """whether a function for TRL gets completions as messages; by default, if its code has `x[0]["content"]`"""
    timeout: float | None = Field(None, gt=0)
    """seconds for a call; a response whose own call takes longer has no score, a call for all responses ends the run"""


def build(config: Config, context: Context) -> Source:
    """The function as a score source: lists of B prompts and responses in, B numbers out, None where it has no score.

    The columns of the rows are passed by name, each a list of B, if the function has a parameter for them; one of them
    is `reference`, the response in the data (a demonstration, or the chosen side of a pair). A function for another
    library gets what that library passes.
    Raises: UserError for a function that cannot be called as `rewards.Function`; when scoring, if a parameter without a
    default names a column that no row of the batch has.
    """
    function = _Function(config)

    def score(samples: Samples) -> Tensor:
        return torch.tensor(function.numbers(samples), device=context.device)

    return score


def check_rows(config: Config, rows: Sequence[Row]) -> None:
    """Raises: UserError if a parameter without a default names a column that no row has."""
    _Function(config).require_columns(columns_of_rows(rows))


class _Function:
    """A user's function, and how it is called."""

    def __init__(self, config: Config) -> None:
        """Raises: UserError if there is no such function, or it does not take what it would be given."""
        self._spec, self._timeout = config.function, config.timeout
        self._function = _load_function(config.function)
        signature = _signature(config.function, self._function)
        parameters = list(signature.parameters.values())
        self._convention = convention_of(self._function, list(signature.parameters), config.messages)
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._texts = [] if self._convention else [p.name for p in by_position[:2]]  # of the prompts and responses
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = {p.name: p for p in named if p.name not in self._texts}
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._required = [name for name, p in self._named.items() if p.default is p.empty]
        texts = [] if self._convention else ["prompts", "responses"]
        _require_call(config.function, signature, texts, self._required)

    def require_columns(self, columns: Columns) -> None:
        """Raises: UserError if a parameter without a default is neither an argument nor one of these columns."""
        convention = self._convention
        known = {ANSWERS} if convention is None else {*convention.names, *convention.right_results(columns)}
        missing = [name for name in self._required if name not in columns and name not in known]
        if missing:
            truths = convention.truths if convention is not None and missing[0] == convention.truth else ()
            cure = f", which can be {', '.join(truths)}" if truths else ""
            raise UserError(
                f"reward '{self._spec}': it takes '{missing[0]}'{cure}, but the rows have "
                f"{', '.join(columns) or 'none'}; if only some rows have it, give it a default: {missing[0]}=None"
            )

    def numbers(self, samples: Samples) -> list[float]:
        """The score of each response. Raises: UserError if the function fails, or returns something else."""
        values, numbers = self._entry(self._values(samples)), list[float]()
        try:
            if isinstance(values, Mapping | Set | str):
                raise TypeError("its items are not one for each response, in their order")
            for value in values:
                numbers.append(_number(self._entry(value)))
        except (TypeError, ValueError, OverflowError) as error:
            is_list = isinstance(values, list | tuple) and len(numbers) < len(samples.responses)
            response = f" for response {samples.responses[len(numbers)][:80]!r}" if is_list else ""
            raise UserError(
                f"reward '{self._spec}': got {type(values).__name__}, expected a list of numbers ({error}{response})"
            ) from None
        return numbers

    def _entry(self, value: Any) -> Any:
        """The scores in what a function for another library returns."""
        key = self._convention.scores if self._convention else ""
        return value[key] if isinstance(value, Mapping) and key in value else value

    def _values(self, samples: Samples) -> Any:
        """What the function returns. Raises: UserError with file, line, error and row, if it raises an exception."""
        texts, named = self._arguments(samples)

        def score(rows: slice) -> Any:
            return self._result([values[rows] for values in texts], {name: x[rows] for name, x in named.items()})

        with plugins.CatchUserCode() as caught:
            return score(slice(None))
        assert caught.error is not None
        row = _first_to_fail(score, len(samples.responses))
        cause = "no single row fails" if row is None else f"for prompt {samples.prompts[row][-80:]!r}"
        response = "" if row is None else f", response {samples.responses[row][:80]!r}"
        raise UserError(
            f"reward '{self._spec}': {plugins.error_location(caught.error)}, {cause}{response}; correct "
            "the function and run the same command again (with --allow-config-change to go on from a checkpoint)"
        ) from caught.error

    def _arguments(self, samples: Samples) -> tuple[list[list[str]], Columns]:
        """Prompts and responses for a function of ours, and the arguments by name."""
        columns, convention = columns_of(samples), self._convention
        self.require_columns(columns)
        if convention is None:
            texts = [list(samples.prompts), list(samples.responses)]
            answers = {ANSWERS: list(samples.answers)} if ANSWERS in self._named else {}
            available = {name: values for name, values in {**answers, **columns}.items() if name not in self._texts}
        else:
            texts = []
            available = {**columns, **convention.right_results(columns), **convention.arguments(samples, columns)}
        return texts, {name: values for name, values in available.items() if self._takes_any or name in self._named}

    def _result(self, texts: list[list[str]], named: Columns) -> Any:
        """What the function returns for these rows; an asynchronous one is waited for."""
        if self._convention is None or not self._convention.single:
            value = self._call(*texts, **named)
            return _runner().run(asyncio.wait_for(value, self._timeout)) if inspect.isawaitable(value) else value
        values = []
        for row in zip(*named.values(), strict=True):
            try:
                values.append(self._call(**dict(zip(named, row, strict=True))))
            except _TimeLimit:
                values.append(None)
        return _runner().run(_gather(values, self._timeout)) if any(map(inspect.isawaitable, values)) else values

    def _call(self, *texts: object, **named: object) -> Any:
        with _time_limit(self._timeout):
            value = self._function(*texts, **named)
            return list(value) if isinstance(value, Iterator) else value  # a generator runs here: its errors are caught


class _TimeLimit(TimeoutError):
    """A call took longer than the option `timeout`."""


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Inside, `_TimeLimit` is raised after `seconds`. Only the main thread has a limit."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, __: FrameType | None) -> None:
        raise _TimeLimit(f"took more than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@functools.cache
def _runner() -> asyncio.Runner:
    """One event loop for all calls: a client that the user's file keeps open belongs to its loop."""
    return asyncio.Runner()


async def _gather(values: list[Any], timeout: float | None) -> list[Any]:
    """The values, awaited together; None for one that takes more than `timeout` seconds."""

    async def wait(value: Any) -> Any:
        try:
            return await asyncio.wait_for(value, timeout) if inspect.isawaitable(value) else value
        except TimeoutError:
            if timeout is None:
                raise
            return None

    return await asyncio.gather(*map(wait, values))


def _number(value: Any) -> float:
    """A score; `NO_SCORE` for None and nothing else."""
    if value is None:
        return NO_SCORE
    number = float(value)
    return math.nan if number == NO_SCORE else number


def _signature(spec: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # a function in C may not say what it takes
        raise UserError(f"reward '{spec}': got {_name(spec)}, expected {EXPECTED} ({error})") from None


def _require_call(spec: str, signature: inspect.Signature, texts: list[str], required: list[str]) -> None:
    """Raises: UserError if the function does not take prompts and responses by position, in this order."""
    try:
        signature.bind(*texts, **dict.fromkeys(required))
        if texts and any(name in names for name, names in zip(signature.parameters, MISPLACED, strict=False)):
            raise TypeError("the prompts come first, then the responses")
    except TypeError as error:
        raise UserError(f"reward '{spec}': got {_name(spec)}{signature}, expected {EXPECTED} ({error})") from None


def _name(spec: str) -> str:
    return spec.partition(":")[2] or DEFAULT


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


def _load_function(spec: str) -> Callable[..., Any]:
    module_name, function_name = plugins.function_of(spec)
    function_name = function_name or DEFAULT
    if module_name.endswith(".py"):
        module = plugins.load_file(module_name)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"reward '{spec}': {error}; expected file.py:function or module:function") from None
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        other = "" if ":" in spec else ", or Config and build(config, context)"
        raise UserError(f"reward '{spec}': no function '{function_name}' in {module_name}; expected {EXPECTED}{other}")
    return function
