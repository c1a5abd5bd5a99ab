"""Sessions over a bucket in memory, two ingresses and a clock that tests set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_build import MemoryBucket

from kvfleet.ingress.runs.transcript import Transcript
from kvfleet.ingress.sessions import session as session_module
from kvfleet.ingress.sessions import sessions as module
from kvfleet.ingress.sessions.session import CHUNK_IDS, OpenTurn, Session, is_expired
from kvfleet.ingress.sessions.session_index import HEADS, SessionIndex, SessionTable, auto_seq_id
from kvfleet.ingress.sessions.sessions import Sessions
from kvfleet.ingress.sessions.turns import ChatTurn, SessionTurn
from kvfleet.ingress.settings import SessionLimits
from kvproto import codec
from kvproto.errors import (
    InvalidRequest,
    KvfleetError,
    LimitExceeded,
    SessionBusy,
    SessionNotFound,
    Unavailable,
)
from kvproto.messages import SessionHead, Turn

LIMITS = SessionLimits(idle_expiry_s=100, per_tenant=3, max_tokens=50_000, lease_s=15, commit_timeout_s=0.0)


@contextlib.asynccontextmanager
async def locked(sessions: Sessions, session: Session, model: str, request: str) -> AsyncIterator[OpenTurn]:
    """A locked turn, abandoned on the way out unless it was committed."""
    turn = await sessions.lock(session, model, request)
    try:
        yield turn
    finally:
        if not turn.ended:
            await sessions.abandon(turn)


class Rig:
    """One bucket, a clock, and as many ingresses as are asked for."""

    def __init__(self) -> None:
        self.bucket = MemoryBucket()
        self.now_ms = 1_000_000
        self.alive = {"one", "two"}
        self.skew_ms: dict[str, int] = {}  # how wrong whose wall clock is
        self.one, self.two = self.ingress("one"), self.ingress("two")

    def ingress(self, name: str) -> Sessions:
        return Sessions(
            self.bucket,
            name,
            LIMITS,
            unix_ms=lambda: self.now_ms + self.skew_ms.get(name, 0),
            is_ingress_alive=lambda other: other in self.alive,
            clock=lambda: self.now_ms / 1000,
        )

    async def turn(self, sessions: Sessions, ids: tuple[int, ...], seq_id: str = "s") -> Session:
        """One whole turn that appends `ids`."""
        session = await sessions.read("t", seq_id)
        async with locked(sessions, session, "m", f"r{self.bucket.sequence}") as turn:
            await sessions.commit(turn, "m", session.ids + ids, "w1")
        return await sessions.read("t", seq_id)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_turn_that_was_cut_waits_for_jetstream(rig: Rig) -> None:
    """Its readers have its beginning; a new one is refused at once, before it has any."""
    rig.one.limits = replace(rig.one.limits, commit_timeout_s=5.0)
    session = await rig.one.read("t", "s")
    turn = SessionTurn(SessionIndex(rig.one), "t", session, "m", "r", (1, 2), history=0)
    rig.bucket.away = True
    with pytest.raises(Unavailable):
        await turn.open()
    rig.bucket.away = False
    await turn.open()
    await turn.abandon(Transcript())
    rig.bucket.away = True
    opening = asyncio.create_task(turn.open())
    await asyncio.sleep(0.05)
    assert not opening.done()
    nothing: Any = None
    await asyncio.wait_for(ChatTurn(nothing, "t", nothing, nothing, turn).open(), 0.2)  # a chat needs no session
    assert not opening.done()
    rig.bucket.away = False
    await opening
    assert rig.one.running == 1
    await turn.abandon(Transcript())
    rig.one.limits = replace(rig.one.limits, commit_timeout_s=0.0)
    rig.bucket.away = True
    with pytest.raises(Unavailable):
        await turn.open()


async def test_turns_append_and_are_durable(rig: Rig) -> None:
    await rig.turn(rig.one, (0, 1, 2))
    session = await rig.turn(rig.two, (3,))
    assert session.ids == (0, 1, 2, 3)
    assert session.head is not None
    assert (session.head.turns, session.head.worker, session.head.turn) == (2, "w1", None)
    assert (await rig.one.read("other", "s")).head is None
    with pytest.raises(SessionNotFound):
        await rig.one.find("other", "s")


@given(st.lists(st.integers(1, 3 * CHUNK_IDS), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_histories_over_many_chunks(lengths: list[int]) -> None:
    async def run() -> None:
        rig = Rig()
        history: tuple[int, ...] = ()
        for n, length in enumerate(lengths):
            tail = tuple(range(n * 100_000, n * 100_000 + length))
            history += tail
            assert (await rig.turn(rig.one if n % 2 else rig.two, tail)).ids == history
        assert len(rig.bucket.keys()) == 1 + -(-len(history) // CHUNK_IDS)
        await rig.one.erase("t", "s")
        assert not rig.bucket.keys()

    asyncio.run(run())


async def test_a_deletion_that_ends_in_the_middle_is_found_by_the_next_one(rig: Rig) -> None:
    """Blocks go before the record: nobody could name them afterwards."""
    await rig.turn(rig.one, (1, 2))
    told = []

    async def ends(session: Session) -> None:
        told.append(session.ids)
        raise Unavailable("NATS is away")

    with pytest.raises(Unavailable):
        await rig.one.erase("t", "s", ends)
    with pytest.raises(Unavailable):
        await rig.two.erase("t", "s", ends)
    assert told == [(1, 2), (1, 2)]


async def test_one_turn_at_a_time(rig: Rig) -> None:
    await rig.turn(rig.one, (1,))
    session = await rig.one.read("t", "s")
    stale = await rig.two.read("t", "s")
    async with locked(rig.one, session, "m", "r1") as turn:
        with pytest.raises(SessionBusy):  # read before the first began
            await rig.two.lock(stale, "m", "r2")
        with pytest.raises(SessionBusy):
            await rig.two.lock(await rig.two.read("t", "s"), "m", "r2")
        with pytest.raises(SessionBusy):
            await rig.two.erase("t", "s")
        await rig.one.commit(turn, "m", (1, 2), "w")
    assert (await rig.two.read("t", "s")).ids == (1, 2)
    assert rig.one.running == rig.two.running == 0


@pytest.mark.parametrize("known", [False, True])
async def test_a_turn_that_fails_leaves_the_session_as_it_was(rig: Rig, known: bool) -> None:
    if known:
        await rig.turn(rig.one, (1, 2))
    before = await rig.one.read("t", "s")
    with pytest.raises(KvfleetError):
        async with locked(rig.one, before, "m", "r"):
            raise KvfleetError("the worker is lost")
    after = await rig.one.read("t", "s")
    left = before.head and replace(before.head, left_request="r")  # so that it alone may still go on
    assert (after.head, after.ids) == (left, before.ids)
    assert not rig.one.is_busy(after)


async def test_a_lease_ends_with_its_ingress_or_its_time_and_renewal_keeps_it(rig: Rig) -> None:
    held = await rig.one.lock(await rig.one.read("t", "s"), "m", "r1")
    rig.now_ms += 14_000
    await rig.one.renew()
    rig.now_ms += 14_000
    assert rig.two.is_busy(await rig.two.read("t", "s"))
    rig.now_ms += 14_000
    assert rig.two.is_busy(await rig.two.read("t", "s")), "it was seen for the first time 14 s ago"
    rig.now_ms += 2_000
    assert not rig.two.is_busy(await rig.two.read("t", "s"))
    await rig.one.renew()
    assert rig.two.is_busy(await rig.two.read("t", "s"))
    rig.alive.remove("one")
    await rig.turn(rig.two, (7,))  # it vanished: nobody waits for its lease
    with pytest.raises(SessionBusy, match="lost its lease"):
        await rig.one.commit(held, "m", (1, 2, 3), "w")
    assert (await rig.two.read("t", "s")).ids == (7,)


@pytest.mark.parametrize("wrong", ["one", "two"])
@pytest.mark.parametrize("by_s", [-60, 60])
async def test_a_wall_clock_that_jumps_takes_nobodys_turn(rig: Rig, wrong: str, by_s: int) -> None:
    held = await rig.one.lock(await rig.one.read("t", "s"), "m", "r1")
    rig.skew_ms[wrong] = by_s * 1000
    for _ in range(6):
        rig.now_ms += 5_000
        await rig.one.renew()
        with pytest.raises(SessionBusy):
            await rig.two.lock(await rig.two.read("t", "s"), "m", "r2")
    await rig.one.commit(held, "m", (1, 2, 3), "w")
    assert (await rig.turn(rig.two, (4,))).ids == (1, 2, 3, 4)


async def test_an_ingress_that_comes_back_overwrites_nothing(rig: Rig) -> None:
    """It wakes with an old view at any moment of the turn that replaced it."""
    await rig.turn(rig.one, (1, 2))
    held = await rig.one.lock(await rig.one.read("t", "s"), "m", "r1")
    assert rig.two.is_busy(await rig.two.read("t", "s"))
    rig.now_ms += 60_000
    session = await rig.two.read("t", "s")
    async with locked(rig.two, session, "m", "r2") as turn:
        with pytest.raises(SessionBusy):
            await rig.one.commit(held, "m", (1, 2, 66, 66), "zombie")  # writes its chunk, then loses at the head
        await rig.two.commit(turn, "m", (1, 2, 3), "w")
    assert (await rig.two.read("t", "s")).ids == (1, 2, 3)

    late = replace(held, ended=False, lock=asyncio.Lock())
    with pytest.raises(SessionBusy):
        await rig.one.commit(late, "m", (1, 2, 66), "zombie")  # this time after the other has committed
    assert (await rig.two.read("t", "s")).ids == (1, 2, 3)


async def test_a_history_that_is_replaced_leaves_no_old_chunks(rig: Rig) -> None:
    await rig.turn(rig.one, tuple(range(2 * CHUNK_IDS)))
    session = await rig.one.read("t", "s")
    async with locked(rig.one, session, "m", "r") as turn:
        await rig.one.commit(turn, "other-model", (9, 8), "w")
    session = await rig.one.read("t", "s")
    assert session.ids == (9, 8)
    assert session.head is not None
    assert session.head.model == "other-model"
    assert len(rig.bucket.keys()) == 2


async def test_without_nats_a_turn_fails_and_is_not_half_committed(rig: Rig) -> None:
    await rig.turn(rig.one, (1,))
    session = await rig.one.read("t", "s")
    with contextlib.suppress(Unavailable):
        async with locked(rig.one, session, "m", "r") as turn:
            rig.bucket.away = True
            await rig.one.commit(turn, "m", (1, 2), "w")
    rig.bucket.away = False
    assert rig.two.is_busy(await rig.two.read("t", "s"))
    rig.now_ms += 20_000
    assert (await rig.turn(rig.two, (5,))).ids == (1, 5)


@pytest.mark.parametrize("lost", ["the writes", "the answers"])
async def test_a_commit_waits_for_nats(rig: Rig, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Its tokens are with the client already. A write whose answer was lost is found to be committed."""
    monkeypatch.setattr(module, "COMMIT_RETRY_S", 0.001)
    limits = replace(LIMITS, commit_timeout_s=20.0)
    patient = Sessions(rig.bucket, "one", limits, unix_ms=lambda: rig.now_ms, is_ingress_alive=lambda _: True)
    await rig.turn(patient, (1,))
    real, fails = rig.bucket.update, iter([True] * 5)

    async def update(key: str, value: bytes, revision: int) -> int:
        if not next(fails, False):
            return await real(key, value, revision)
        if lost == "the answers":
            await real(key, value, revision)
        raise Unavailable("no answer in time")

    session = await patient.read("t", "s")
    async with locked(patient, session, "m", "r") as turn:
        monkeypatch.setattr(rig.bucket, "update", update)
        await patient.commit(turn, "m", (1, 2), "w")
    assert turn.ended
    after = await patient.read("t", "s")
    assert (after.ids, after.head and after.head.turns) == ((1, 2), 2)
    assert not patient.is_busy(after)


async def test_expiry(rig: Rig) -> None:
    await rig.turn(rig.one, (1,))
    rig.now_ms += 101_000
    expired = await rig.two.read("t", "s")
    assert expired.head is None
    assert (await rig.turn(rig.two, (2,))).ids == (2,)  # a new session under the old name
    assert len(rig.bucket.keys()) == 2  # and nothing of the old one


def test_expired_is_pure() -> None:
    head = SessionHead("s", "m", 1, 1, 0, 0)
    assert not is_expired(head, 100_000, LIMITS)
    assert is_expired(head, 100_001, LIMITS)
    assert not is_expired(replace(head, turn=Turn("r", "one", 1000)), 10**9, LIMITS)


def test_observations_are_of_one_revision_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_OBSERVED", 2)
    seen = session_module.LeaseObserver()
    assert [seen.unchanged_s("a", 1, now) for now in (0.0, 3.0)] == [0.0, 3.0]
    assert [seen.unchanged_s("a", 2, now) for now in (4.0, 5.0)] == [0.0, 1.0]
    for key in "bc":
        seen.unchanged_s(key, 1, 6.0)
    assert seen.unchanged_s("a", 2, 7.0) == 0.0, "it was forgotten"


async def test_length_is_limited(rig: Rig) -> None:
    rig.one.check_length(50_000, "prompt")
    with pytest.raises(InvalidRequest, match="at most 50000"):
        rig.one.check_length(50_001, "prompt")


async def test_an_unreadable_head_is_an_error_and_is_not_overwritten(rig: Rig) -> None:
    key = (await rig.one.read("t", "s")).key
    await rig.bucket.update(key, b"\x01garbage", 0)
    with pytest.raises(Unavailable, match="unreadable"):
        await rig.one.read("t", "s")


# ---------------------------------------------------------------------------------------------- index


@contextlib.asynccontextmanager
async def indexed(rig: Rig):  # type: ignore[no-untyped-def]
    index = SessionIndex(rig.one)
    running = asyncio.create_task(index.read(await rig.bucket.watch(HEADS)))
    await settle()
    yield index
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_index_follows_and_sweeps(rig: Rig) -> None:
    await rig.turn(rig.two, (1,), "old")
    async with indexed(rig) as index:
        rig.now_ms += 60_000
        await rig.turn(rig.two, (1,), "new")
        await settle()
        assert index.table.count("t") == index.table.total == 2
        assert await index.sweep() == 0
        rig.now_ms += 60_000
        assert await index.sweep() == 1
        await settle()
        assert index.table.count("t") == 1
        assert (await rig.one.read("t", "new")).head is not None
        rig.now_ms += 60_000
        held = await rig.two.lock(await rig.two.read("t", "new"), "m", "r")
        assert await index.sweep() == 0  # a running turn is use
        await rig.two.abandon(held)
        await rig.two.erase_key(held.session.key, only_expired=False)
        assert not rig.bucket.keys()


async def test_a_tenant_keeps_to_its_number_and_unnamed_sessions_give_way(rig: Rig) -> None:
    async with indexed(rig) as index:
        for seq_id in ("a", "b"):
            await rig.turn(rig.one, (1,), seq_id)
        unnamed = auto_seq_id("r")
        await rig.turn(rig.one, (1,), unnamed)
        await settle()
        await asyncio.gather(index.admit("t"), index.admit("t"))
        await settle()
        assert (await rig.one.read("t", unnamed)).head is None
        await rig.turn(rig.one, (1,), "c")
        await settle()
        with pytest.raises(LimitExceeded):
            await index.admit("t")
        await index.admit("u")


def test_the_table_counts() -> None:
    table = SessionTable()
    for n in range(5):
        head = SessionHead(f"auto-{n}" if n % 2 else f"named-{n}", "m", 1, 1, 0, 100 - n)
        table.put(f"t.{n}", head)
        table.put(f"t.{n}", head)
    assert (table.count("t"), table.count("u"), table.total) == (5, 0, 5)
    assert table.surplus("t", 5) == ["t.3", "t.1"]
    assert set(table.unused_since(98, 10)) == {"t.3", "t.4"}
    assert len(table.unused_since(1000, 2)) == 2
    table.remove("t.3")
    table.remove("t.3")
    assert table.total == 4
    assert codec.decode(SessionHead, codec.encode(head)) == head


@pytest.mark.parametrize("known", [False, True])
async def test_a_write_that_was_delivered_after_all_is_our_own(
    rig: Rig, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage of NATS a renewal times out and is delivered later: the turn goes on, it has no rival."""
    if known:
        await rig.turn(rig.one, (0, 1, 2))
    real = rig.bucket.update

    async def delivered_unheard(key: str, value: bytes, revision: int) -> int:
        await real(key, value, revision)
        raise Unavailable("no answer in time")

    for end in ("renew", "commit", "abandon"):
        session = await rig.one.read("t", "s")
        async with contextlib.AsyncExitStack() as stack:
            turn = await stack.enter_async_context(locked(rig.one, session, "m", f"r-{end}"))
            monkeypatch.setattr(rig.bucket, "update", delivered_unheard)
            await rig.one.renew()
            monkeypatch.setattr(rig.bucket, "update", real)
            if end == "renew":
                await rig.one.renew()
            if end != "abandon":
                await rig.one.commit(turn, "m", (*session.ids, 7), "w1")
        after = await rig.one.read("t", "s")
        assert not rig.one.is_busy(after), end
        assert after.ids == (session.ids if end == "abandon" else (*session.ids, 7)), end


# ---------------------------------------------------------------------------------------------- repeats


async def test_the_same_request_at_another_ingress_takes_its_turn_over_and_one_of_them_commits(rig: Rig) -> None:
    await rig.turn(rig.one, (1, 2))
    for first_commits in (True, False):
        session = await rig.one.read("t", "s")
        one = await rig.one.lock(session, "m", f"r-{first_commits}")
        with pytest.raises(SessionBusy):
            await rig.two.lock(await rig.two.read("t", "s"), "m", "another")
        two = await rig.two.lock(await rig.two.read("t", "s"), "m", f"r-{first_commits}")
        await rig.one.renew()  # lost to the other: noticed, not taken back
        ids = (*session.ids, 3)
        for ingress, turn in [(rig.one, one), (rig.two, two)][:: 1 if first_commits else -1]:
            await ingress.commit(turn, "m", ids, "w", start=len(session.ids))
        after = await rig.two.read("t", "s")
        assert after.ids == ids
        assert after.head is not None
        assert session.head is not None
        assert after.head.turns == session.head.turns + 1, "committed once"
        assert after.is_last(f"r-{first_commits}")
        assert after.before_last().ids == session.ids
    assert rig.one.running == rig.two.running == 0


@pytest.mark.parametrize("known", [False, True])
async def test_who_lets_go_of_a_turn_that_was_taken_over_leaves_it(rig: Rig, known: bool) -> None:
    if known:
        await rig.turn(rig.one, (1, 2))
    one = await rig.one.lock(before := await rig.one.read("t", "s"), "m", "r")
    two = await rig.two.lock(await rig.two.read("t", "s"), "m", "r")
    await rig.one.abandon(one)
    assert rig.one.is_busy(await rig.one.read("t", "s"))
    await rig.two.abandon(two)
    after = await rig.one.read("t", "s")
    assert (after.ids, after.head is None) == (before.ids, before.head is None)
    assert not after.has_moved_on("r")
    await rig.turn(rig.two, (9,))
    assert (await rig.one.read("t", "s")).has_moved_on("r")


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("renews", [False, True])
async def test_who_took_a_turn_over_and_let_go_takes_it_from_nobody(rig: Rig, known: bool, renews: bool) -> None:
    """The first still runs the same request, and commits; it holds its session again with its next renewal."""
    if known:
        await rig.turn(rig.one, (1, 2))
    before = await rig.one.read("t", "s")
    one = await rig.one.lock(before, "m", "r")
    two = await rig.two.lock(await rig.two.read("t", "s"), "m", "r")
    await rig.two.abandon(two)
    if renews:
        await rig.one.renew()
        with pytest.raises(SessionBusy):
            await rig.two.lock(await rig.two.read("t", "s"), "m", "another")
    await rig.one.commit(one, "m", (*before.ids, 3), "w", start=len(before.ids))
    after = await rig.two.read("t", "s")
    assert (after.ids, after.is_last("r"), rig.two.is_busy(after)) == ((*before.ids, 3), True, False)


async def test_who_took_a_turn_over_and_died_leaves_it_to_the_first(rig: Rig) -> None:
    one = await rig.one.lock(await rig.one.read("t", "s"), "m", "r")
    await rig.two.lock(await rig.two.read("t", "s"), "m", "r")
    rig.alive.remove("two")
    await rig.one.renew()
    three = rig.ingress("three")
    with pytest.raises(SessionBusy):
        await three.lock(await three.read("t", "s"), "m", "another")
    await rig.one.commit(one, "m", (1,), "w")


async def test_a_turn_that_another_took_in_between_is_lost_all_the_same(rig: Rig) -> None:
    await rig.turn(rig.one, (1, 2))
    one = await rig.one.lock(await rig.one.read("t", "s"), "m", "r")
    await rig.two.abandon(await rig.two.lock(await rig.two.read("t", "s"), "m", "r"))
    other = await rig.two.lock(await rig.two.read("t", "s"), "m", "another")
    with pytest.raises(SessionBusy, match="lost its lease"):
        await rig.one.commit(one, "m", (1, 2, 3), "w")
    await rig.two.commit(other, "m", (1, 2, 4), "w")
    with pytest.raises(SessionBusy, match="lost its lease"):
        await rig.one.commit(one, "m", (1, 2, 3), "w")
    assert (await rig.two.read("t", "s")).ids == (1, 2, 4)


@pytest.mark.parametrize("known", [False, True])
async def test_the_conversation_has_gone_on_when_the_slower_one_commits(rig: Rig, known: bool) -> None:
    if known:
        await rig.turn(rig.one, (1, 2))
    before = await rig.one.read("t", "s")
    one = await rig.one.lock(before, "m", "r")
    two = await rig.two.lock(await rig.two.read("t", "s"), "m", "r")
    await rig.two.commit(two, "m", (*before.ids, 3), "w")
    await rig.turn(rig.two, (4,))
    await rig.one.commit(one, "m", (*before.ids, 3), "w")
    assert (await rig.two.read("t", "s")).ids == (*before.ids, 3, 4)
    assert rig.one.running == 0


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("meanwhile", ["begins", "renews", "commits", "lets go"])
async def test_a_twin_that_writes_while_a_session_is_read_refuses_nobody(rig: Rig, known: bool, meanwhile: str) -> None:
    if known:
        await rig.turn(rig.one, (1, 2))
    before = stale = await rig.two.read("t", "s")
    one = await rig.one.lock(await rig.one.read("t", "s"), "m", "r")
    if meanwhile != "begins":
        stale = await rig.two.read("t", "s")
    if meanwhile == "renews":
        await rig.one.renew()
    elif meanwhile == "commits":
        await rig.one.commit(one, "m", (*before.ids, 3), "w")
    elif meanwhile == "lets go":
        await rig.one.abandon(one)
    two = await rig.two.lock(stale, "m", "r")
    assert two.ended == (meanwhile == "commits")
    await rig.two.commit(two, "m", (*before.ids, 3), "w")
    after = await rig.one.read("t", "s")
    assert (after.ids, after.head and after.head.turns) == ((*before.ids, 3), 2 if known else 1)
    with pytest.raises(SessionBusy):
        await rig.one.lock(before, "m", "another")


def test_a_commit_gives_up_before_its_lease_ends() -> None:
    limits = SessionLimits()
    assert limits.lease_s / 3 + limits.commit_timeout_s + 2.0 <= limits.lease_s
