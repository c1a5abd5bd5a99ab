"""Which other regions had a part in a session: known after turns that were committed, moved or cut."""

from __future__ import annotations

from kvfleet.ingress.runs.transcript import Transcript
from kvfleet.ingress.sessions.sessions import Sessions
from kvproto import codec
from kvproto.messages import (
    Finished,
    FinishReason,
    RegionModel,
    RegionSummary,
    SessionHead,
    State,
    WorkerRecord,
)
from kvproto.regions import MAX_REGIONS, Regions
from tests.unit.ingress.sessions.test_ingress_sessions import Rig


async def regions_of(sessions: Sessions) -> tuple[str, ...]:
    head = (await sessions.read("t", "s")).head
    assert head is not None
    return head.regions


async def test_regions_are_kept_from_turn_to_turn() -> None:
    rig = Rig()
    for n, (worker, regions) in enumerate((("w", ()), ("eu.w", ("eu",)), ("w", ()), ("asia.w", ("eu", "asia")))):
        session = await rig.one.read("t", "s")
        turn = await rig.one.lock(session, "m", f"r{n}")
        await rig.one.commit(turn, "m", (*session.ids, n), worker, regions=regions)
    assert await regions_of(rig.one) == ("eu", "asia")
    session = await rig.one.read("t", "s")
    assert session.head is not None
    assert session.head.worker == "asia.w"
    turn = await rig.one.lock(session, "m", "another history")
    await rig.one.commit(turn, "m", (9,), "w")
    assert await regions_of(rig.one) == ("eu", "asia"), "its old blocks may be there still"


async def test_a_turn_that_was_cut_left_blocks_too() -> None:
    rig = Rig()
    await rig.turn(rig.one, (1, 2))
    turn = await rig.one.lock(await rig.one.read("t", "s"), "m", "r1")
    await rig.one.abandon(turn, ("eu",))
    session = await rig.one.read("t", "s")
    assert (session.ids, await regions_of(rig.one)) == ((1, 2), ("eu",))


async def test_what_another_ingress_wrote_down_about_the_same_request_stays() -> None:
    rig = Rig()
    await rig.turn(rig.one, (1, 2))
    one = await rig.one.lock(await rig.one.read("t", "s"), "m", "same")
    two = await rig.two.lock(await rig.two.read("t", "s"), "m", "same")
    await rig.two.abandon(two, ("eu",))
    await rig.one.commit(one, "m", (1, 2, 3), "asia.w", regions=("asia",))
    assert await regions_of(rig.one) == ("eu", "asia")


def test_a_stream_that_moved_home_was_there() -> None:
    transcript = Transcript()
    for worker in (None, "eu.w7", "eu.w8", "w0"):
        transcript.served_by(worker)
    transcript.take([Finished("r", 0, FinishReason.LENGTH, 1, 1, worker="w0")])
    assert (transcript.worker, transcript.regions) == ("w0", ("eu",))
    transcript.served_by("asia.w0")
    assert (transcript.worker, transcript.regions) == ("asia.w0", ("eu", "asia"))


def test_heads_and_summaries_of_versions_without_it() -> None:
    head = SessionHead("s", "m", 1, 1, 0, 0, regions=tuple(f"r{n}" for n in range(MAX_REGIONS)))
    assert codec.decode(SessionHead, codec.encode(head)) == head
    record = WorkerRecord("w0", "e", "l", State.READY, "m", "", "host", 1, (1, 1), "h1")
    regions = Regions("us")
    regions.hear(RegionSummary("eu", "old", (RegionModel("m", 1, 0.0, record),)), 0.0)
    assert regions.workers("eu", "m", 0.0) == ["eu.w0"]
    regions.hear(RegionSummary("eu", "new", (RegionModel("m", 2, 0.0, record, ("w0", "w1")),)), 0.0)
    assert regions.workers("eu", "m", 0.0) == ["eu.w0", "eu.w1"]
    assert regions.workers("eu", "other", 0.0) == regions.workers("asia", "m", 0.0) == []
    assert regions.workers("eu", "m", 60.0) == []
