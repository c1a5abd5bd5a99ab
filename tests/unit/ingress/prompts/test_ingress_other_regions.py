"""Models that only another region serves: their bundles, and their names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from ingress_build import demo_bundle

from kvfleet.ingress.prompts.models import Models, OtherRegions
from kvproto import codec
from kvproto.connection import Message
from kvproto.errors import WorkerLost
from kvproto.fleet_view import FleetView
from kvproto.messages import Bundle, RegionModel, RegionSummary, State, WorkerRecord
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S


@dataclass
class Said:
    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None


class Wire:
    """The part of a connection that is needed: what is said on it goes to whoever subscribed."""

    async def subscribe(self, subject: str, callback: Callable[[Message], Awaitable[None]]) -> Any:
        self.tell = callback


class Source:
    """Workers that lose the first questions."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked: list[str] = []

    async def bundle(self, worker: str) -> Bundle:
        self.asked.append(worker)
        if len(self.asked) <= self.failures:
            raise WorkerLost(f"{worker} is gone")
        return demo_bundle()

    async def miss(self, model: str) -> None:
        pass


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Rig:
    """An ingress's knowledge of other regions, and its models; none is served at home."""

    def __init__(self, executor: ThreadPoolExecutor, failures: int = 0) -> None:
        self.now = 0.0
        self.wire, self.source = Wire(), Source(failures)
        self.regions = OtherRegions(self.wire, Subjects("kvf", "us"), lambda: self.now)  # type: ignore[arg-type]
        self.models = Models(self.source, FleetView(), executor, self.regions)
        self.regions.on_change = self.models.on_regions

    async def hear(self, summary: RegionSummary) -> None:
        await self.wire.tell(Said(f"kvf.region.{summary.region}.summary", codec.encode(summary)))


def summary(region: str = "eu") -> RegionSummary:
    record = WorkerRecord("w0", "e", "l", State.READY, "m", "", "host", 1, (1, 1), "h1")
    return RegionSummary(region, "p", (RegionModel("m", 1, 0.0, record),))


async def test_a_bundle_that_could_not_be_had_is_asked_for_again(executor: ThreadPoolExecutor) -> None:
    rig = Rig(executor, failures=2)
    await rig.regions.start()
    async with asyncio.timeout(LIMIT_S):
        while not rig.models.is_ready():
            await rig.hear(summary())
            await asyncio.sleep(0.01)
    for _ in range(5):
        await rig.hear(summary())
        await asyncio.sleep(0)
    assert rig.source.asked == ["eu.w0"] * 3
    await rig.models.stop()


async def test_a_name_is_known_wherever_it_is_served(executor: ThreadPoolExecutor) -> None:
    rig = Rig(executor)
    await rig.regions.start()
    assert rig.models.known("m") is None
    await rig.hear(summary())
    assert rig.models.known("m") == "m"
    assert rig.models.known("other") is None
    assert rig.models.known(None) is None
    rig.now = 60.0
    assert rig.models.known("m") is None
    await rig.models.stop()
