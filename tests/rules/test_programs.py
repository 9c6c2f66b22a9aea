"""Programs are functions of their words: one place reads the command line of the process, and none changes it."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from rlhf import cli
from tests.rules.test_architecture import PRODUCT, functions, module_name, shown, tree

READER = "rlhf/console.py"


def mentions(source: ast.AST) -> list[ast.AST]:
    """Every way to the words of the process: `sys.argv`, `argv` imported from sys, getattr and setattr."""
    return [
        node
        for node in ast.walk(source)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv")
        or (isinstance(node, ast.ImportFrom) and node.module == "sys" and any(a.name == "argv" for a in node.names))
        or (isinstance(node, ast.Call) and re.match(r"(\w+\.)?[gs]etattr\(sys, 'argv'", ast.unparse(node)))
    ]


@pytest.mark.parametrize(
    "source", ["sys.argv = []", "sys.argv[1:]", "from sys import argv", "setattr(sys, 'argv', [])", "f(sys.argv)"]
)
def test_each_way_to_the_words_is_seen(source: str) -> None:
    assert mentions(ast.parse(source))


def test_one_function_reads_the_words_of_the_process() -> None:
    found = {shown(path): mentions(tree(path)) for path in PRODUCT if mentions(tree(path))}
    assert [*found] == [READER]
    [read] = found[READER]
    assert isinstance(read, ast.Attribute) and isinstance(read.ctx, ast.Load)


def programs() -> list[tuple[str, Path]]:
    candidates = [path for path in PRODUCT if "def main" in path.read_text(encoding="utf-8")]  # 3 s to parse them all
    return [(module_name(path), path) for path in candidates if any(node.name == "main" for node in functions(path))]


def test_every_verb_has_a_program() -> None:
    assert {module for module, _, _ in cli.VERBS.values()} <= {module for module, _ in programs()}


@pytest.mark.parametrize("module", [module for module, _ in programs()])
def test_a_program_takes_its_words(module: str) -> None:
    """`main()` reads those of the process; a program that runs another hands words on."""
    first, *others = inspect.signature(importlib.import_module(module).main).parameters.values()
    assert first.name == "argv" and first.default is None
    assert all(isinstance(other.default, str) for other in others)
