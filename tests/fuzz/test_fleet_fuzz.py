"""What placement hears and is asked, read by its own readers into its own core: of any content, it goes on.

Everything comes in as bytes on a subject, as NATS would bring it: damaged, of other kinds than the subject's, with
numbers as large as the wire allows, of workers that nobody knows. Nothing is raised but what a caller is to be told.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Event, Fail, Tick, WorkerAnswered
from kvfleet.placement.index.changes import read_changes
from kvfleet.placement.io import intake
from kvfleet.placement.io.replica import Replica
from kvfleet.placement.io.subscriptions import Subscriptions
from kvfleet.placement.workers.prompts import HashedPrompts
from kvproto import codec
from kvproto import messages as m
from kvproto.block_hash import digest_term
from kvproto.buckets import Entry
from kvproto.errors import InvalidRequest
from kvproto.fleet_view import Change
from kvproto.ids import model_token
from kvproto.members import Members
from kvproto.subjects import Subjects
from kvservice.event_log import EventLog
from tests.fuzz.damage import some, sometimes_damaged
from tests.unit.kvproto.test_codec import frames, instances

SUBJECTS = Subjects("kvf")
WORKERS = st.sampled_from(["w1", "w2", "v1", "nobody"])
LIVES = st.sampled_from(["e1", "e2"])
TIERS = st.sampled_from([m.Tier.DEVICE, m.Tier.HOST, m.Tier.VAULT])
MODELS = st.sampled_from(["demo", "demo", "Another Model"])
STATES = st.sampled_from([m.State.READY, m.State.READY, m.State.DRAINING])
REQUESTS = st.sampled_from(["r1", "r2"])
some_fleets = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
Sent = tuple[str, str, bytes | None]  # where to, whose, what


def of(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any message of a kind, but for some fields, such that it is taken seriously."""
    return st.builds(replace, instances(kind), **fields)


def sent(what: str, messages: st.SearchStrategy[Any], whose: Callable[[Any], str]) -> st.SearchStrategy[Sent]:
    def as_bytes(message: Any) -> st.SearchStrategy[Sent]:
        encode = codec.encode_events if isinstance(message, m.KvEvents) else codec.encode
        return sometimes_damaged(encode(message)).map(lambda data: (what, whose(message), data))

    return messages.flatmap(as_bytes)


records = of(m.WorkerRecord, id=WORKERS, epoch=LIVES, model=MODELS, state=STATES, versions=st.just((1, 1)))
members = of(m.MemberRecord, id=WORKERS, epoch=LIVES, role=st.just(m.Role.VAULT))
beats = of(m.Heartbeat, worker=WORKERS, epoch=LIVES, state=STATES, event_seq=st.integers(0, 5))
hashes = st.lists(st.sampled_from([bytes([at]) * 16 for at in range(8)]), max_size=6).map(tuple)
runs = st.builds(m.BlockRun, st.just(bytes(16)), hashes)
tiers = st.builds(m.TierEvents, TIERS, st.booleans(), st.lists(runs, max_size=2).map(tuple))
events = st.builds(m.KvEvents, LIVES, st.integers(0, 5), st.lists(tiers, max_size=3).map(tuple))
parts = of(m.Snapshot, epoch=LIVES, part=st.integers(0, 2), parts=st.integers(0, 3), hashes=hashes.map(b"".join))
passed = of(m.Milestone, tenant=st.just("public"), request=REQUESTS, attempt=st.integers(0, 2))
milestones = of(m.Milestones, worker=WORKERS, epoch=LIVES, items=st.lists(passed, max_size=4).map(tuple))
asks = of(
    m.PlaceRequest, model=MODELS, request=REQUESTS, attempt=st.integers(0, 2), policy=st.none(), prompt=st.none(),
    prompt_ids=st.just((1, 2, 3)),
)  # fmt: skip
producers = of(m.ProducerRequest, request=REQUESTS, prompt=st.just("hi"), prompt_ids=st.just(()), model=MODELS)
frames_of = st.builds(lambda frame, request: replace(frame, request=request), frames, REQUESTS)
bodies = of(m.GenerateRequest, request=REQUESTS, inbox=st.just("_INBOX.x"), model=MODELS)
capsules = of(m.Capsule, tenant=st.just("public"), worker=WORKERS, request=bodies)
watch = of(m.Watch, tenant=st.just("public"), request=REQUESTS, worker=WORKERS, epoch=LIVES, inbox=st.just("_INBOX.x"))
watches = of(m.Watches, items=st.lists(watch, max_size=2).map(tuple))
everything = st.one_of(
    sent("record", records, lambda one: one.id),
    sent("member", members, lambda one: one.id),
    st.tuples(st.sampled_from(["record", "member"]), WORKERS, st.none()),
    sent("beat", beats, lambda one: one.worker),
    st.tuples(WORKERS, events).flatmap(lambda pair: sent("events", st.just(pair[1]), lambda _: pair[0])),
    st.tuples(WORKERS, parts).flatmap(lambda pair: sent("snapshot", st.just(pair[1]), lambda _: pair[0])),
    sent("milestones", milestones, lambda one: one.worker),
    sent("bookings", instances(m.BookedBatch), lambda _: "w1"),
    sometimes_damaged(b'{"client":{"name":"worker-w1"}}').map(lambda data: ("disconnect", "w1", data)),
    sent("place", asks, lambda one: one.model),
    sent("generate", producers, lambda one: one.model),
    st.lists(frames_of, max_size=3)
    .flatmap(lambda several: sometimes_damaged(codec.encode_frames(several)))
    .map(lambda data: ("answer", "", data)),
    sent("capsule", capsules, lambda _: ""),
    sent("watches", watches, lambda _: ""),
)


def worker_record(worker: str) -> m.WorkerRecord:
    return m.WorkerRecord(worker, "e1", "l", m.State.READY, "demo", "", "h", 1, (1, 1))


class Placement:
    """The loop's readers and the core, without NATS between."""

    def __init__(self) -> None:
        self.core = PlacementCore(
            "p1", "_plc.p1", lambda: 0.5,
            PlacementConfig(policy="bounded_ring", index_blocks=64, max_wait_s=None, max_forwarded=10),
            prompts=HashedPrompts(b"key"), unix_ms=lambda: 1_000_000,
        )  # fmt: skip
        self.now = 0.0
        self.numbers = itertools.count(1)
        connection: Any = SimpleNamespace(on_disconnect=[], on_reconnect=[], is_connected=True, inbox_prefix="_plc.p1")
        members = Members(connection, SUBJECTS, on_heartbeat=self.tell)
        self.subscriptions = Subscriptions(Replica(connection, SUBJECTS), members, self.tell, self.core, None)
        self.refused = 0
        members._tell = self._tell  # type: ignore[method-assign]

    def _tell(self, change: Change | None, worker: str) -> None:
        """As `Members` does, but for what it does with a listener that fails."""
        view = self.subscriptions.members.view.workers.get(worker)
        if change is not None and view is not None:
            self.subscriptions._on_worker(change, view)

    def tell(self, event: Event) -> None:
        self.core.handle(event, self.now)

    async def hear(self, what: str, who: str, data: bytes | None) -> None:
        subscriptions, number = self.subscriptions, next(self.numbers)
        if what in ("record", "member"):
            role = "worker" if what == "record" else "vault"
            subscriptions.members._apply(Entry(f"{role}.{who}", data, number, expired=number % 2 == 0))
            return
        assert data is not None
        ways = {
            "beat": (SUBJECTS.heartbeat(who), subscriptions.members._heartbeat),
            "events": (SUBJECTS.events(who), subscriptions._on_events),
            "snapshot": (f"_plc.p1.s.{who}.{number}", subscriptions._on_snapshot),
            "milestones": (SUBJECTS.milestones(who), subscriptions._on_milestones),
            "bookings": (SUBJECTS.placement_bookings(), subscriptions._on_bookings),
            "disconnect": ("$SYS.ACCOUNT.A.DISCONNECT", subscriptions._on_disconnect),
        }
        subject, read = ways[what]
        message: Any = SimpleNamespace(subject=subject, data=data, reply="", headers=None)
        await read(message)

    def ask(self, what: str, who: str, data: bytes) -> None:
        try:
            if what == "place":
                self.take(intake.read_place(f"kvf.place.public.{model_token(who)}", "_INBOX.x", data))
            elif what == "generate":
                subject = f"kvf.generate.public.{model_token(who)}"
                as_json = data[:1] == b"{"
                self.take(
                    intake.read_generate(
                        subject, "_INBOX.x", data, as_json=as_json, new_request="n1", new_seed=1, unix_ms=1_000_000
                    )
                )
            elif what == "answer":
                for frame in intake.read_answer(data):
                    self.tell(WorkerAnswered(frame, frame.request))
            elif what == "capsule":
                self.take(intake.read_capsule("_wrk.w1.x", data))
            else:
                self.take(intake.read_watches("_wrk.w1.x", data))
        except InvalidRequest:
            self.refused += 1

    def take(self, read: Event | Fail) -> None:
        if not isinstance(read, Fail):
            self.tell(read)


@some_fleets
@given(st.lists(st.tuples(everything, st.sampled_from([0.0, 0.01, 0.5, 5.0])), min_size=6, max_size=30))
def test_placement_goes_on_whatever_it_hears(happened: list[tuple[Sent, float]]) -> None:
    async def run() -> None:
        placement = Placement()
        for worker in ("w1", "w2"):
            await placement.hear("record", worker, codec.encode(worker_record(worker)))
        for (what, who, data), gap in happened:
            placement.now += gap
            if data is not None and what in ("place", "generate", "answer", "capsule", "watches"):
                placement.ask(what, who, data)
            else:
                await placement.hear(what, who, data)
            placement.core.check_integrity()
            for worker in placement.subscriptions.members.view.sweep(placement.now):
                assert worker
        placement.now += 1e6
        placement.tell(Tick())
        placement.core.check_integrity()
        codec.encode(placement.core.stats())

    asyncio.run(run())


@some
@given(
    st.lists(
        st.tuples(st.text(max_size=12), records.map(codec.encode).flatmap(sometimes_damaged) | st.none()), max_size=8
    )
)
def test_records_under_any_key(entries: list[tuple[str, bytes | None]]) -> None:
    """Who can write the bucket can write anything: nobody is in the view under a name that is not his record's."""

    async def run() -> None:
        connection: Any = SimpleNamespace(on_disconnect=[], on_reconnect=[], is_connected=True)
        members = Members(connection, SUBJECTS)
        told: list[str] = []
        members.listeners.append(lambda change, view: told.append(view.record.id))
        for number, (key, value) in enumerate(entries, 1):
            for written in (key, f"worker.{key}", f"vault.{key}", "worker.w1"):
                members._apply(Entry(written, value, number))
                members.ring("demo")
        assert all(name == view.record.id for name, view in members.view.workers.items())
        assert set(told) <= set(members.view.workers)

    asyncio.run(run())


@some
@given(st.lists(st.tuples(tiers, st.booleans(), st.floats(0.0, 0.2)), max_size=12))
def test_what_an_event_log_says_is_read_as_it_was_meant(noted: list[tuple[m.TierEvents, bool, float]]) -> None:
    """Through bytes: numbers without a gap, and the digest that its heartbeats carry."""
    log, now, seen, digest, plain = EventLog("e1"), 0.0, 0, 0, 0
    for change, flushes, gap in noted:
        now += gap
        log.note([change])
        if not flushes or (event := log.flush(now)) is None:
            continue
        read = read_changes(codec.encode_events(event))
        seen += 1
        assert (read.epoch, read.seq) == ("e1", seen)
        digest ^= read.tier_digest
        plain ^= read.digest
        assert (digest, plain) == (log.digest, log.plain_digest)
        assert log.snapshot({}, digest)[0].seq == seen
        for part in log.snapshot({m.Tier.DEVICE: [bytes(16)]}, digest):
            assert codec.decode(m.Snapshot, codec.encode(part)) == part
    assert log.digest == digest
    assert digest_term(bytes(16)) == 0
