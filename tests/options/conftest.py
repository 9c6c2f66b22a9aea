"""One world of models and rows for all of tests/options, and one process as a group of ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.options import world
from tests.support import tiny


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options")
    world.make(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield
