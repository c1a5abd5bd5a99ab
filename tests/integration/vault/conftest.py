"""Vaults on the run's NATS server, each test in a namespace of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from vault_rig import Fleet

from kvfleet.placement.workers.warm_up import warm_up
from kvproto.subjects import Subjects


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Placement's, by an earlier run if there was one."""
    warm_up()


@pytest_asyncio.fixture
async def fleet(nats_url: str, fleet_buckets: Subjects, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(nats_url, fleet_buckets, tmp_path)
    yield fleet
    await fleet.close()
