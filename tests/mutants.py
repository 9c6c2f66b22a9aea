"""Mutants: functions with one edit, put in the place of the right ones for as long as a test runs."""

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import pytest

Check = Callable[[], None]


class Mutant(NamedTuple):
    fault: str
    function: Callable[..., Any]
    right: str
    wrong: str


def each(caught_by: Mapping[Check, Sequence[Mutant]]) -> pytest.MarkDecorator:
    """A test for every mutant, of `check` and `mutant`."""
    pairs = [(check, mutant) for check, mutants in caught_by.items() for mutant in mutants]
    return pytest.mark.parametrize(("check", "mutant"), [pytest.param(*pair, id=pair[1].fault) for pair in pairs])


def require_caught(check: Check, mutant: Mutant) -> None:
    """The check fails by its own assertion while the mutant stands."""
    with applied(mutant), pytest.raises(AssertionError):
        check()


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The code of the function is that of the mutant, whoever has imported it under whatever name."""
    function = _plain(mutant)
    right = function.__code__
    function.__code__ = mutated(mutant).__code__
    try:
        yield
    finally:
        function.__code__ = right


def mutated(mutant: Mutant) -> FunctionType:
    """The function compiled again from its source with the edit made, in the globals of its module."""
    function = _plain(mutant)
    source = textwrap.dedent(inspect.getsource(function))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    lines = source.splitlines(keepends=True)
    if ast.get_docstring(node) is not None:
        said = node.body[0]
        lines[said.lineno - 1 : said.end_lineno] = [" " * said.col_offset + "0\n"]
    source = "".join(lines[node.lineno - 1 :])  # without its decorators
    assert source.count(mutant.right) == 1, f"{mutant.fault}: the edit no longer matches the source"
    made: dict[str, FunctionType] = {}
    exec(source.replace(mutant.right, mutant.wrong), function.__globals__, made)
    return made[function.__name__]


def _plain(mutant: Mutant) -> FunctionType:
    function: Any = inspect.unwrap(mutant.function)  # from under torch.no_grad, say
    return function
