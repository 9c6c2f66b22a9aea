"""A command line run inside the test's own process."""

import re
import sys
from collections.abc import Callable

import pytest

from rlhf import console, errors

Run = Callable[..., tuple[int, str, str]]


STATUS = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)\n", re.MULTILINE)
"""A line that says what is being done or how far it is, where stderr is no terminal."""


def without_status(stderr: str) -> str:
    """What else a program said on stderr."""
    return STATUS.sub("", stderr)


def runner(
    name: str, main: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """`run(*argv)` calls the program: (exit code, what it printed, what it said on stderr)."""
    monkeypatch.setattr(console, "quiet_libraries", lambda: None)

    def call(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *argv])
        try:
            code = errors.run_as_user(main)
        except SystemExit as leaving:
            code = int(str(leaving.code))
        captured = capsys.readouterr()
        return code, captured.out, without_status(captured.err)

    return call
