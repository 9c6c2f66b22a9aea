"""The mutants of a file: each is the file with one edit."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import libcst as cst
from libcst.metadata import CodePosition, MetadataWrapper, WhitespaceInclusivePositionProvider

from tests.mutation.operators import (
    OPERATORS,
    UNSEEN_ARGUMENTS,
    UNSEEN_CALLS,
    elsewhere,
    name_of,
    negated,
    without_method,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit: `line` of `function` in `file` becomes `becomes`. Names of methods: Class.method."""

    file: str
    function: str
    number: int
    line: str
    becomes: str
    source: str
    """the whole file with the edit"""

    @property
    def name(self) -> str:
        """The same as long as the function has this line, wherever it is in the file."""
        return hashlib.sha256("\n".join((self.file, self.function, self.line, self.becomes)).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.function or 'module'}\n    - {self.line}\n    + {self.becomes}"


def mutants(root: Path, file: str) -> Iterator[Mutant]:
    """Every mutant of `file`, in the order of its lines; of equal edits in one function, the first."""
    source = (root / file).read_text(encoding="utf-8")
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    edits = _Edits(MetadataWrapper(cst.parse_module(source)))
    names = set()
    for function, (start, end), text in edits.edits:
        first, last = starts[start.line - 1] + start.column, starts[end.line - 1] + end.column
        line, becomes = (_joined(source, first, last, new) for new in (source[first:last], text))
        mutant = Mutant(file, function, start.line, line, becomes, source[:first] + text + source[last:])
        if line != becomes and mutant.name not in names:
            names.add(mutant.name)
            yield mutant


def _joined(source: str, start: int, end: int, text: str) -> str:
    """The lines around source[start:end], with `text` there, as one line."""
    before, after = source.rfind("\n", 0, start) + 1, source.find("\n", end)
    lines = (source[before:start] + text + source[end:after]).splitlines()
    return " ".join(stripped for line in lines if (stripped := line.strip()))


class _Edits(cst.CSTVisitor):
    """Collects (function, where, text in its stead)."""

    def __init__(self, wrapper: MetadataWrapper) -> None:
        super().__init__()
        self.edits: list[tuple[str, tuple[CodePosition, CodePosition], str]] = []
        self._module = wrapper.module
        self._positions = wrapper.resolve(WhitespaceInclusivePositionProvider)
        self._scopes: list[str] = []
        self._functions = 0
        self._statement: cst.CSTNode | None = None
        self._elsewhere: cst.CSTNode | None = None
        self._module.visit(self)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_unseen(node) or node is self._elsewhere:
            return False
        if isinstance(node, cst.If | cst.IfExp):
            self._elsewhere = elsewhere(node) or self._elsewhere
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._scopes.append(node.name.value)
            self._functions += isinstance(node, cst.FunctionDef)
        elif isinstance(node, cst.If):
            for edit in negated(node.test):
                self._edit(node.test, edit)
        elif self._functions or isinstance(node, cst.BaseNumber | cst.Name):  # of modules and classes, constants
            for kind, operator in OPERATORS:
                if isinstance(node, kind) and (operator, node) != (without_method, self._statement):
                    for edit in operator(node):
                        self._edit(node, edit)
        if isinstance(node, cst.Expr):  # the whole of it is left out
            self._statement = node.value
        return True

    def _edit(self, node: cst.CSTNode, edit: cst.CSTNode) -> None:
        where = self._positions[node]
        self.edits.append((".".join(self._scopes), (where.start, where.end), self._module.code_for_node(edit)))

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._scopes.pop()
            self._functions -= isinstance(original_node, cst.FunctionDef)


def _is_unseen(node: cst.CSTNode) -> bool:
    """Whether nothing in the node changes a number on a CPU."""
    if isinstance(node, cst.Call):
        return name_of(node.func) in UNSEEN_CALLS
    if isinstance(node, cst.Arg):
        return node.keyword is not None and node.keyword.value in UNSEEN_ARGUMENTS
    kinds = cst.Annotation | cst.Decorator | cst.Raise | cst.Assert | cst.Import | cst.ImportFrom
    return isinstance(node, kinds)
