"""Who is told to forget a session's blocks, and when again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfleet.ingress.sessions import session_blocks
from kvfleet.ingress.sessions.session_blocks import SessionBlocks
from kvproto.errors import WorkerLost
from kvproto.fleet_view import FleetView
from kvproto.messages import AdminRequest, State, WorkerRecord

Ids = tuple[int, ...]


class Fleet:
    """As `Client`, of workers that are here, held up, or begin anew."""

    def __init__(self, *workers: str) -> None:
        self.members = SimpleNamespace(view=FleetView())
        self.told: list[tuple[str, Ids]] = []
        for worker in workers:
            self.begin(worker, "e1")

    def begin(self, worker: str, epoch: str) -> None:
        record = WorkerRecord(worker, epoch, "lease", State.READY, "demo", "a:1", "h", 1, (1, 1))
        self.members.view.on_worker_record(record, 1, asyncio.get_running_loop().time())

    def hold_up(self, worker: str) -> None:
        self.members.view.on_worker_gone(worker, asyncio.get_running_loop().time(), expired=False)

    async def admin(self, worker: str, question: AdminRequest, timeout_s: float) -> bytes:
        if "." not in worker and not self.members.view.is_alive(worker):  # one of another region is not in this view
            raise WorkerLost(worker)
        self.told.append((worker, question.ids))
        return b""


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_blocks, "HOME_RETRY_S", 0.01)


def blocks_of(fleet: Any, regions: Callable[[str, str], list[str]] = lambda region, model: []) -> SessionBlocks:
    return SessionBlocks(fleet, regions)


async def test_one_that_is_held_up_is_told_once_it_is_back(fast: None) -> None:
    fleet = Fleet("a", "b")
    blocks = blocks_of(fleet)
    fleet.hold_up("b")
    await blocks.erase_ids("t", "demo", (1, 2), ())
    await asyncio.sleep(0.05)
    assert fleet.told == [("a", (1, 2))]
    fleet.begin("b", "e1")
    while blocks._erasing:
        await asyncio.sleep(0.005)
    assert fleet.told == [("a", (1, 2)), ("b", (1, 2))]


async def test_another_life_has_nothing_to_forget(fast: None) -> None:
    fleet = Fleet("a", "b")
    blocks = blocks_of(fleet)
    fleet.hold_up("b")
    await blocks.erase_ids("t", "demo", (1, 2), ())
    fleet.begin("b", "e2")
    while blocks._erasing:
        await asyncio.sleep(0.005)
    assert fleet.told == [("a", (1, 2))]


async def test_a_worker_that_stays_away_does_not_keep_other_regions_from_being_told(fast: None) -> None:
    fleet = Fleet("a", "b")
    blocks = blocks_of(fleet, lambda region, model: ["west.c"] if region == "west" else [])
    fleet.hold_up("b")
    for number in range(session_blocks.MAX_LATER + 1):
        await blocks.erase_ids("t", "demo", (number,), ())
    assert len(blocks._erasing) == session_blocks.MAX_LATER
    await blocks.erase_ids("t", "demo", (7, 7), ("west",))
    await asyncio.sleep(0.05)
    assert ("west.c", (7, 7)) in fleet.told
    await blocks.close()
