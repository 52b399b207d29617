"""One server of the embedded model for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.server.serving import Serving, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running
