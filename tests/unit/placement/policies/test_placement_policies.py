"""Policies: whom they choose, whom they leave out, and how a ring moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_build import MODEL, a_beat, a_core, a_record, an_ask

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import WorkerLeft, WorkerRegistered
from kvfleet.placement.policies import build_policies
from kvproto.errors import InvalidRequest, ModelNotFound, NotFound, NoWorkers, Unavailable
from kvproto.fleet_view import Change, FleetView
from kvproto.hash_ring import HashRing, ring_key
from kvproto.messages import State

ALL = list(build_policies(lambda: 0.0))
CHOOSING = [name for name in ALL if name != "direct"]


def place(core: PlacementCore, now: float = 1.0, **fields: object) -> str:
    return core.decider.decide("public", an_ask(**fields), now).worker  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", CHOOSING)
class TestEveryPolicy:
    def test_chooses_a_ready_worker_of_the_model(self, policy: str) -> None:
        core = a_core("w1", policy=policy)
        core.handle(WorkerRegistered(a_record("w0", state=State.STARTING)), 0.0)
        core.handle(WorkerRegistered(a_record("w2", state=State.DRAINING)), 0.0)
        core.handle(WorkerRegistered(a_record("w3", model="other")), 0.0)
        assert {place(core, request=f"r{i}") for i in range(20)} == {"w1"}

    def test_leaves_out_the_excluded_while_another_is_ready(self, policy: str) -> None:
        core = a_core("w1", "w2", "w3", policy=policy)
        assert {place(core, request=f"r{i}", session=f"s{i}", excluded=("w1", "w3")) for i in range(20)} == {"w2"}

    def test_if_all_are_excluded_only_the_last_one_stays_out(self, policy: str) -> None:
        core = a_core("w1", "w2", policy=policy)
        assert {place(core, request=f"r{i}", session=f"s{i}", excluded=("w1", "w2")) for i in range(20)} == {"w1"}

    def test_a_lone_excluded_worker_is_chosen_rather_than_nobody(self, policy: str) -> None:
        assert place(a_core("w1", policy=policy), excluded=("w9", "w1")) == "w1"

    def test_no_ready_worker(self, policy: str) -> None:
        core = a_core(policy=policy)
        core.handle(WorkerRegistered(a_record("w1", state=State.STARTING)), 0.0)
        with pytest.raises(NoWorkers):
            place(core)

    def test_a_model_nobody_ever_served(self, policy: str) -> None:
        with pytest.raises(ModelNotFound):
            place(a_core("w1", policy=policy), model="nope")

    def test_before_any_worker_was_seen_nothing_is_said_of_models(self, policy: str) -> None:
        with pytest.raises(NoWorkers):
            place(a_core(policy=policy))

    def test_a_model_whose_workers_left(self, policy: str) -> None:
        core = a_core("w1", policy=policy)
        core.handle(WorkerLeft("w1"), 1.0)
        with pytest.raises(NoWorkers):
            place(core)
        assert core.decider.no_worker_total == 1


class TestByName:
    def test_a_request_may_name_its_policy(self) -> None:
        core = a_core("w1", "w2")
        placement = core.decider.decide("public", an_ask(policy="direct", worker="w2"), 1.0)
        assert (placement.worker, placement.policy) == ("w2", "direct")

    def test_an_unknown_policy_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(InvalidRequest, match="bounded_ring") as error:
            place(a_core("w1"), policy="best")
        assert error.value.field == "policy"
        with pytest.raises(InvalidRequest, match="best"):
            a_core(policy="best")


class TestDirect:
    def test_errors_name_the_worker(self) -> None:
        core = a_core("w1")
        core.handle(WorkerRegistered(a_record("w2", state=State.DRAINING)), 0.0)
        core.handle(WorkerRegistered(a_record("w3", model="other")), 0.0)
        for worker, kind in ((None, InvalidRequest), ("w9", NotFound), ("w2", Unavailable), ("w3", NotFound)):
            with pytest.raises(kind) as error:
                place(core, policy="direct", worker=worker)
            assert error.value.field == "worker"

    def test_naming_a_worker_overrules_excluding_it(self) -> None:
        assert place(a_core("w1", "w2"), policy="direct", worker="w1", excluded=("w1",)) == "w1"


class TestRandom:
    def test_is_uniform_over_what_chance_says(self) -> None:
        chosen = [place(a_core("w1", "w2", "w3", policy="random", chance=c)) for c in (0.0, 0.34, 0.67, 0.9999999)]
        assert chosen == ["w1", "w2", "w3", "w3"]


class TestRoundRobin:
    def test_takes_turns_per_model_and_survives_leaves(self) -> None:
        core = a_core("w1", "w2", "w3", policy="round_robin")
        core.handle(WorkerRegistered(a_record("x1", model="other")), 0.0)
        turns = [place(core, request=f"r{i}") for i in range(4)]
        assert turns == ["w1", "w2", "w3", "w1"]
        assert place(core, model="other") == "x1"
        core.handle(WorkerLeft("w2"), 1.0)
        assert [place(core, request=f"q{i}") for i in range(2)] == ["w3", "w1"]


class TestBoundedRing:
    def test_a_hot_key_does_not_bury_one_worker(self) -> None:
        core = a_core("w1", "w2", "w3", "w4")
        for i in range(100):
            place(core, request=f"r{i}", session="hot")
        loads = [core.bookings.requests_at(f"w{i}") for i in range(1, 5)]
        assert sum(loads) == 100
        assert max(loads) <= 33  # ceil(1.25 * mean of 101/4), one more than the floor for rounding

    def test_counts_what_workers_report(self) -> None:
        core = a_core("w1", "w2")
        first = place(core, session="s")
        other = "w2" if first == "w1" else "w1"
        core.handle(a_beat(first, waiting=10, running=10), 9.0)
        assert place(core, session="s", now=9.0) == other


workers_st = st.lists(st.sampled_from([f"w{i}" for i in range(8)]), min_size=1, max_size=6, unique=True)


class TestRing:
    @given(workers=workers_st, extra=st.sampled_from(["x1", "x2"]), keys=st.lists(st.text(max_size=8), max_size=30))
    def test_keys_move_only_to_a_worker_that_joins_and_back_when_it_leaves(
        self, workers: list[str], extra: str, keys: list[str]
    ) -> None:
        core = a_core(*workers, policy="ring")
        sessions = [k for k in keys if k]
        before = {s: place(core, session=s) for s in sessions}
        core.handle(WorkerRegistered(a_record(extra)), 1.0)
        during = {s: place(core, session=s, now=1.0) for s in sessions}
        assert all(during[s] in (before[s], extra) for s in sessions)
        core.handle(WorkerLeft(extra), 2.0)
        assert {s: place(core, session=s, now=2.0) for s in sessions} == before

    @given(
        moves=st.lists(
            st.tuples(
                st.sampled_from(["record", "gone", "beat"]),
                st.sampled_from(["w1", "w2", "w3", "w4"]),
                st.sampled_from(["e1", "e2"]),
                st.sampled_from([State.STARTING, State.READY, State.DRAINING]),
            ),
            max_size=30,
        )
    )
    def test_is_the_ring_that_every_client_sees(self, moves: list[tuple[str, str, str, State]]) -> None:
        """The loop's translation of a members view into events leaves core and view with equal rings."""
        view, core, now = FleetView(), a_core(), 0.0
        for kind, worker, epoch, state in moves:
            now += 0.1
            if kind == "record":
                change = view.on_worker_record(a_record(worker, epoch=epoch, state=state), 1, now)
            elif kind == "gone":
                change = view.on_worker_gone(worker, now, expired=False)
            else:
                change = view.on_heartbeat(a_beat(worker, epoch=epoch, state=state), now)
            record = view.with_state(worker)
            known = view.workers.get(worker)
            if change is not None and record is not None and known is not None:
                left = change is Change.LEFT
                core.handle(WorkerLeft(worker) if left else WorkerRegistered(record, known.heartbeat), now)
            if kind == "beat":
                core.handle(a_beat(worker, epoch=epoch, state=state), now)
            core.check_integrity()
            assert core.fleet.ready(MODEL).ring.nodes == HashRing(v.record.id for v in view.ready(MODEL)).nodes

    def test_places_where_a_client_would_on_its_own(self) -> None:
        core = a_core("w1", "w2", "w3", policy="ring")
        ring = HashRing(["w3", "w1", "w2"])
        for i in range(50):
            ids = (i, 2, 3)
            assert place(core, prompt_ids=ids) == ring.owner(ring_key("public", session=None, prompt_ids=ids))

    def test_tenants_have_their_own_places(self) -> None:
        core = a_core(*[f"w{i}" for i in range(16)], policy="ring")
        chosen = {core.decider.decide(f"t{i}", an_ask(session="same"), 1.0).worker for i in range(32)}
        assert len(chosen) > 4


class TestExpectation:
    def test_ttft_is_unknown_until_a_rate_was_measured(self) -> None:
        core = a_core("w1")
        assert core.decider.decide("public", an_ask(), 1.0).expected_ttft_s is None
        core.handle(a_beat("w1", queued=500, rate=1000.0), 1.1)
        placement = core.decider.decide("public", an_ask("r2", prompt_ids=tuple(range(497))), 1.2)
        assert placement.expected_ttft_s == pytest.approx((500 + 3 + 497) / 1000 - 0.1)  # 0.1 s have been worked off
        assert placement.expected_hit == {}
        assert placement.why
