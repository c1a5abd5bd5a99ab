"""One fleet for all code of the pages, as a reader starts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.up import Up


@pytest.fixture(scope="session")
def up() -> Iterator[Up]:
    fleet = Up("--port", "0", "--dtype", "float32")
    try:
        yield fleet.wait_ready()
    finally:
        fleet.stop()
