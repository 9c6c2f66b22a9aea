"""Runs of which `make test` takes the quick ones, and `make test-long` all."""

from collections.abc import Container
from typing import Any

import pytest


def marked_long(value: Any, quick: Container[Any]) -> Any:
    """A parameter that is marked long unless it is one of `quick`; a tuple is several arguments."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=[] if value in quick else [pytest.mark.long])


def includes_long(request: pytest.FixtureRequest) -> bool:
    """Whether a test of the requesting file that is marked long runs in this session."""
    return any(item.path == request.path and item.get_closest_marker("long") for item in request.session.items)
