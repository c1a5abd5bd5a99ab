"""Tests of running containers. scripts/check_containers builds the images, starts compose and runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containers.compose_fleet import ComposeFleet

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("KVFLEET_TEST_CONTAINERS") == "demand":
        return
    reason = "wants a Docker daemon and the images: scripts/check_containers builds them and runs this"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def compose() -> Iterator[ComposeFleet]:
    """The project that scripts/check_containers has brought up."""
    fleet = ComposeFleet(
        os.environ["KVFLEET_COMPOSE_PROJECT"], os.environ["KVFLEET_COMPOSE_URL"], Path(os.environ["KVFLEET_SECRETS"])
    )
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def key(compose: ComposeFleet) -> dict[str, Any]:
    """The header that the first API key makes."""
    return {"Authorization": f"Bearer {compose.api_key}"}
