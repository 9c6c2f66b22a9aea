"""Two hosts for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.multi_node import world


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[world.World]:
    """Network namespaces of this machine; skips, with the reason, where they are not permitted."""
    reason = world.why_not()
    if reason:
        pytest.skip(reason)
    with world.two_hosts(tmp_path_factory.mktemp("hosts")) as two:
        yield two
