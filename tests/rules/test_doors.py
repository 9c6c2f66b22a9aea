"""Rooms that the others enter by one door."""

from pathlib import Path

from tests.rules.test_architecture import PYTHON, each, imports, shown


@each([path for path in PYTHON if not shown(path).startswith(("rlhf/cpu/", "tests/"))])
def test_what_is_for_cpus_is_used_by_the_functions_of_its_package(path: Path) -> None:
    for line, name in imports(path):
        assert not name.startswith("rlhf.cpu."), f"{shown(path)}:{line}: {name}; expected a function of rlhf.cpu"
