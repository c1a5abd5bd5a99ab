"""One embedded fleet on the demo model for all end-to-end tests; for those of the page a browser and a small fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from kvproto.subjects import Subjects
from tests.support.browser import Browser, find_chromium
from tests.support.page_fleet import PageFleet
from tests.support.up import Up


@pytest.fixture(scope="session")
def up() -> Iterator[Up]:
    fleet = Up("--port", "0", "--dtype", "float32")
    try:
        yield fleet.wait_ready()
    finally:
        fleet.stop()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("no chromium here: scripts/browser_install")
    browser = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
async def fleet(nats_url: str, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PageFleet]:
    # On a busy machine too it is placement that places, not the ring, which the ledger knows nothing of.
    monkeypatch.setattr("kvproto.streams.placing.PLACE_TIMEOUT_S", 5.0)
    fleet = PageFleet(nats_url, fleet_buckets)
    await fleet.start()
    yield fleet
    await fleet.stop()


@pytest.fixture
def browser(chromium: Browser, fleet: PageFleet) -> Iterator[Browser]:
    """It leaves the page before the fleet goes."""
    yield chromium
    chromium.open("about:blank")
    chromium.problems.clear()
