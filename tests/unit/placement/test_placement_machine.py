"""Anything may happen in any order: books balance after every step, every request ends once, and all drains to zero."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from placement_build import a_beat, a_core, a_generate, a_record, accepted, an_ask, failed, finished

from kvfleet.placement.advice.questions import preload, survey
from kvfleet.placement.events import (
    Action,
    Answer,
    CapsuleHeard,
    Event,
    Fail,
    Forward,
    NobodyListens,
    PingUnanswered,
    PlaceAsked,
    TakenOver,
    Tick,
    WatchesHeard,
    WorkerAnswered,
    WorkerDisconnected,
    WorkerLeft,
    WorkerRegistered,
)
from kvfleet.placement.index.changes import Changes, HolderChange
from kvfleet.placement.policies import build_policies
from kvproto.messages import (
    Booked,
    BookedBatch,
    Capsule,
    Milestone,
    Milestones,
    Passed,
    PreloadRequest,
    Progress,
    Snapshot,
    State,
    Tier,
    Watch,
    Watches,
)

PULLS = st.none() | st.integers(1, 4)
VAULTS = st.sampled_from(["v1", "v2", "w4"])  # one is named as a worker
WORKERS = st.sampled_from(["w1", "w2", "w3", "w4"])
STATES = st.sampled_from([State.STARTING, State.READY, State.READY, State.READY, State.DRAINING])
PLACED = "_INBOX.placed"


class Placement(RuleBasedStateMachine):
    """Chooses events, carries out actions on paper: which offers are open, which requests the producer saw end."""

    def __init__(self) -> None:
        super().__init__()
        self.core = a_core()
        self.now = 0.0
        self.lives: dict[str, int] = {}
        self.offers: list[Forward] = []
        self.readers: dict[str, str] = {}  # inbox -> request: one may be asked for again, by somebody else
        self.ended_by_placement: Counter[str] = Counter()
        self.ended_otherwise: Counter[str] = Counter()  # by the worker, or nobody watches any more
        self.places = 0
        self.answers = 0

    def tell(self, event: Event) -> list[Action]:
        before = self.in_flight()
        actions = self.core.handle(event, self.now)
        told = {action.inbox for action in actions if isinstance(action, Fail)}
        self.ended_otherwise.update(before - self.in_flight() - told)
        for action in actions:
            if isinstance(action, Forward):
                self.offers.append(action)
            elif isinstance(action, Answer) or (isinstance(action, Fail) and action.inbox == PLACED):
                self.answers += 1
            elif isinstance(action, Fail):
                self.ended_by_placement[action.inbox] += 1
        return actions

    def in_flight(self) -> set[str]:
        found = [self.core.in_flight.find(key) for key in self.core.in_flight]
        return {one.inbox for one in found if one is not None}

    def epoch(self, worker: str) -> str:
        return f"e{self.lives.setdefault(worker, 1):04}"

    # ------------------------------------------------------------------ members

    @rule(worker=WORKERS, state=STATES, attaches=st.sampled_from([True, True, False]))
    def join_or_update(self, worker: str, state: State, attaches: bool) -> None:
        record = replace(a_record(worker, epoch=self.epoch(worker), state=state), attaches=attaches)
        self.tell(WorkerRegistered(record))

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        self.tell(WorkerLeft(worker))
        assert not self.core.bookings.requests_at(worker)

    @rule(worker=WORKERS)
    def restart(self, worker: str) -> None:
        if worker in self.core.fleet.workers:
            self.lives[worker] += 1
            self.tell(WorkerRegistered(a_record(worker, epoch=self.epoch(worker))))

    @rule(worker=WORKERS, running=st.integers(0, 9), stale=st.booleans(), state=STATES)
    def beat(self, worker: str, running: int, stale: bool, state: State) -> None:
        epoch = "e0000" if stale else self.epoch(worker)
        self.tell(a_beat(worker, epoch=epoch, state=state, running=running))

    @rule(vault=VAULTS, life=st.integers(1, 2))
    def vault_joins(self, vault: str, life: int) -> None:
        self.core.join_vault(vault, f"e{life:04}")

    @rule(vault=VAULTS)
    def vault_leaves(self, vault: str) -> None:
        self.core.leave_vault(vault)
        assert vault not in self.core.vaults

    @rule(vault=VAULTS, life=st.integers(1, 2), seq=st.integers(0, 4), prompt=st.integers(0, 3), removed=st.booleans())
    def vault_speaks(self, vault: str, life: int, seq: int, prompt: int, removed: bool) -> None:
        hashes = np.arange(8, dtype=np.uint64).reshape(-1, 2) + np.uint64(100 * prompt)
        epoch = f"e{life:04}"
        changes = Changes(epoch, seq, (HolderChange(2, removed, hashes),), 5)
        self.core.indexer.on_changes(vault, changes, self.now)
        self.tell(replace(a_beat(vault, epoch=epoch), event_seq=seq))
        snapshot = Snapshot(epoch, seq, Tier.VAULT, 0, 1, 7, hashes.tobytes())
        self.core.indexer.on_snapshot(vault, snapshot, self.now)

    @rule(model=st.sampled_from(["", "demo", "nope"]))
    def long_questions(self, model: str) -> None:
        known = self.core.decider.heat, self.core.fleet, self.core.indexer
        *_, costs = survey(model, *known, self.now)
        *_, _plan = preload(PreloadRequest("w1", model, "", 16, 10), *known, 1000, self.now)
        ready = {w.id for w in self.core.fleet.ready("demo").workers}
        least = {"": 2, "demo": 1, "nope": 100}[model]
        assert {one.worker for one in costs} == (ready if len(ready) >= least else set())

    @rule(worker=WORKERS, certain=st.booleans())
    def suspect(self, worker: str, certain: bool) -> None:
        for _ in self.tell(WorkerDisconnected(worker)):
            self.tell(PingUnanswered(worker, certain))

    # ------------------------------------------------------------------ requests

    @rule(
        request=st.integers(0, 5),
        policy=st.sampled_from([None, *build_policies(lambda: 0.0), "unknown"]),
        excluded=st.lists(WORKERS, max_size=4),
        worker=WORKERS,
        model=st.sampled_from(["demo", "demo", "demo", "nope"]),
    )
    def place(self, request: int, policy: str | None, excluded: list[str], worker: str, model: str) -> None:
        ask = an_ask(f"p{request}", policy=policy, excluded=tuple(excluded), worker=worker, model=model)
        self.places += 1
        (action,) = self.tell(PlaceAsked(PLACED, "public", ask))
        if isinstance(action, Answer) and action.placement.attached:
            assert action.placement.worker in self.core.fleet.workers
            assert action.placement.worker not in excluded
        elif isinstance(action, Answer) and policy != "direct":
            ready = {w.id for w in self.core.fleet.ready("demo").workers}
            assert action.placement.worker in ready
            assert action.placement.worker not in excluded or ready <= set(excluded)

    @rule(deadline_ms=st.none() | st.integers(0, 200), again=st.booleans(), tenant=st.sampled_from(["public", "acme"]))
    def produce(self, deadline_ms: int | None, again: bool, tenant: str) -> None:
        inbox = f"_INBOX.{len(self.readers)}"
        request = f"g{len(self.readers) - (again and len(self.readers) > 0)}"
        self.readers[inbox] = request
        self.tell(a_generate(request, deadline_ms=deadline_ms, inbox=inbox, tenant=tenant))

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """A draining worker lets go of what it has accepted, as far as this replica knows."""
        offer = data.draw(st.sampled_from(self.offers[-8:]))
        watched = self.core.in_flight.watched.values()
        if any(
            (w.inbox, w.attempt, w.worker) == (offer.request.inbox, offer.request.attempt, offer.worker)
            for w in watched
        ):
            request = replace(offer.request, output_ids=(1, 2), prompt_ids=(1, 2, 3), prompt=None, deadline_ms=None)
            actions = self.tell(CapsuleHeard("_wrk.x", Capsule(offer.tenant, offer.worker, request)))
            assert actions[0] == TakenOver("_wrk.x")
            assert offer.request.inbox in self.in_flight()

    @rule()
    def goes(self) -> None:
        """It hands on what no worker has, and is the other replica as well."""
        before = self.in_flight()
        actions = self.core.forwarding.leave(self.now)
        told = {action.inbox for action in actions if isinstance(action, Fail)}
        self.ended_by_placement.update(told)
        assert not self.core.in_flight.offered
        assert not self.core.in_flight.parked
        carried = [action for action in actions if isinstance(action, Capsule)]
        self.ended_otherwise.update(before - self.in_flight() - told - {one.request.inbox for one in carried})
        for capsule in carried:
            self.tell(CapsuleHeard("", capsule))

    @rule(worker=WORKERS, request=st.integers(0, 3), life=st.sampled_from(["e0000", "e0001"]))
    def adopt(self, worker: str, request: int, life: str) -> None:
        inbox = f"_INBOX.{len(self.readers)}"
        before = len(self.core.in_flight)
        watch = Watch("public", f"g{request}", 0, worker, life, inbox)
        self.tell(WatchesHeard(Watches("p2", (watch,))))
        if len(self.core.in_flight) > before:
            self.readers[inbox] = watch.request

    @precondition(lambda self: self.offers)
    @rule(
        data=st.data(),
        what=st.sampled_from(
            [
                "accept",
                "accept",
                "old life",
                "503",
                "refuse",
                "give back",
                "finish",
                "fail",
                "cancelled",
                "forgot",
                "progress",
            ]
        ),
    )
    def answer(self, data: st.DataObject, what: str) -> None:
        """Any offer may be answered, old ones and twice too."""
        offer = data.draw(st.sampled_from(self.offers[-8:]))
        request, attempt = offer.request.request, offer.request.attempt
        key = (offer.reply.split(".") or [""])[-2] if offer.reply else request
        if what == "503":
            self.tell(NobodyListens(key, attempt))
            return
        frame = {
            "accept": accepted(request, attempt, offer.worker, self.epoch(offer.worker)),
            "old life": accepted(request, attempt, offer.worker, "e0000"),
            "refuse": failed(request, attempt, "out_of_memory", retryable=True),
            "give back": failed(request, attempt, "context_length_exceeded", retryable=False),
            "finish": finished(request, attempt),
            "fail": failed(request, attempt, "engine_failure", retryable=True),
            "cancelled": failed(request, attempt, "cancelled", retryable=False),
            "forgot": failed(request, attempt, "worker_lost", retryable=True),
            "progress": Progress(request, attempt, 3),
        }[what]
        self.tell(WorkerAnswered(frame, key))

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.05, 0.1, 0.6, 3.1, 16.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    # ------------------------------------------------------------------ what workers and replicas tell

    @rule(
        worker=WORKERS,
        request=st.integers(0, 5),
        kind=st.sampled_from("pg"),
        attempt=st.integers(0, 1),
        passed=st.lists(st.sampled_from(list(Passed)), min_size=1, max_size=4),
        cached=st.integers(0, 9),
        stale=st.booleans(),
        code=st.sampled_from([None, "cancelled"]),
    )
    def milestones(
        self,
        worker: str,
        request: int,
        kind: str,
        attempt: int,
        passed: list[Passed],
        cached: int,
        stale: bool,
        code: str | None,
    ) -> None:
        """In any order, of requests that it may never have been given."""
        found = {"device": cached} if cached else {}
        items = tuple(Milestone("public", f"{kind}{request}", attempt, one, 1.0, 3, found, code=code) for one in passed)
        self.tell(Milestones(worker, "e0000" if stale else self.epoch(worker), items))

    @rule(worker=WORKERS, request=st.integers(0, 5), placement=st.sampled_from(["p1", "p2"]))
    def share(self, worker: str, request: int, placement: str) -> None:
        self.tell(BookedBatch(placement, (Booked("public", f"p{request}", 0, worker, 100),)))

    @rule(worker=WORKERS, seq=st.integers(0, 4), prompt=st.integers(0, 3), removed=st.booleans())
    def blocks(self, worker: str, seq: int, prompt: int, removed: bool) -> None:
        hashes = np.arange(8, dtype=np.uint64).reshape(-1, 2) + np.uint64(100 * prompt)
        change = Changes(self.epoch(worker), seq, (HolderChange(0, removed, hashes),), 5)
        self.core.indexer.on_changes(worker, change, self.now)

    @rule(worker=WORKERS, seq=st.integers(0, 4), parts=st.integers(1, 2), part=st.integers(0, 2), pull=PULLS)
    def snapshot(self, worker: str, seq: int, parts: int, part: int, pull: int | None) -> None:
        raw = np.arange(8, dtype=np.uint64).tobytes()
        one = Snapshot(self.epoch(worker), seq, Tier.DEVICE, part, parts, 7, raw)
        self.core.indexer.on_snapshot(worker, one, self.now, pull)

    @rule(worker=WORKERS, pull=PULLS)
    def refuse_snapshot(self, worker: str, pull: int | None) -> None:
        self.core.indexer.on_snapshot_refused(worker, pull, self.now)

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def books_balance(self) -> None:
        self.core.check_integrity()
        self.core.indexer.check_integrity()
        assert self.answers == self.places

    @invariant()
    def every_reader_is_in_flight_or_was_told_once(self) -> None:
        in_flight = self.in_flight()
        for inbox, request in self.readers.items():
            ends = self.ended_by_placement[inbox] + self.ended_otherwise[inbox]
            assert ends == (inbox not in in_flight), (inbox, request)

    def teardown(self) -> None:
        """Everybody leaves, time passes: nothing may be left."""
        for worker in list(self.core.fleet.workers):
            self.tell(WorkerLeft(worker))
        for vault in list(self.core.vaults):
            self.core.leave_vault(vault)
        for _ in range(40):
            self.now += 1.0
            self.tell(Tick())
        self.books_balance()
        self.every_reader_is_in_flight_or_was_told_once()
        assert len(self.core.in_flight) == 0
        assert self.core.stats().booked == 0
        assert self.core.bookings.running == 0
        assert len(self.core.inflight) == 0
        assert len(self.core.repeats) == 0
        assert len(self.core.indexer.index) == 0
        assert self.core.in_flight.due() is None


Placement.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_machine = Placement.TestCase
