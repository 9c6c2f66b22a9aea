"""Whether the tests that tables of faults name are there, and in which suite they run."""

import ast
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
APART = {"faults", "long"}
"""markers of tests that `make test` leaves out"""


def require_collected(rows: Mapping[int, Iterable[str]], in_faults: Collection[str] = ()) -> None:
    """Each row names tests, and pytest collects each: in `make test-faults` those of `in_faults`, which are files or
    tests, and in `make test` all others."""
    for row, names in rows.items():
        assert names, f"row {row}"
        for name in names:
            file, test = name.split("::")
            markers = collected(TESTS / file).get(test)
            assert markers is not None, f"row {row}: {name}: no such test"
            expected = {"faults"} if {file, name} & set(in_faults) else set()
            assert markers & APART == expected, f"row {row}: {name}: marked {markers}, expected {expected}"


@cache
def collected(file: Path) -> dict[str, set[str]]:
    """The test functions of a file that pytest collects, and the markers of each; not those of single parameters."""
    assert file.name.startswith("test_"), file
    body = ast.parse(file.read_text(encoding="utf-8")).body
    own = {target.id: node.value for node in body if isinstance(node, ast.Assign) for target in _names(node)}
    of_file = _markers([own["pytestmark"]]) if "pytestmark" in own else set()
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {test.name: of_file | _markers(test.decorator_list) for test in tests}


def _names(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]


def _markers(expressions: Iterable[ast.expr]) -> set[str]:
    """Of `pytest.mark.name`, called or not, or several in a list."""
    each = [part for x in expressions for part in (x.elts if isinstance(x, ast.List) else [x])]
    plain = [x.func if isinstance(x, ast.Call) else x for x in each]
    return {x.attr for x in plain if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "pytest.mark"}
