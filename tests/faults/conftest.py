"""The uninterrupted runs that others must equal, and how long each test took."""

from functools import cache
from pathlib import Path

import pytest

from tests.faults import harness


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> harness.Whole:
    """`whole(processes, step)`: the directory of a chain that nothing interrupted, finished up to that step."""
    folder = tmp_path_factory.mktemp("whole")

    @cache
    def of(processes: int, step: int) -> Path:
        out = folder / f"of-{processes}"
        if step > 1:
            of(processes, step - 1)
        harness.run(out, harness.chain(out, "--steps", str(step), processes=processes)).require(0)
        return out

    return of
