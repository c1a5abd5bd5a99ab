"""Who is alive, with a clock that stands still until a test moves it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.fleet_view import (
    FORGET_DEAD_S,
    HEARTBEAT_FRESH_S,
    MASS_HOLD_S,
    MASS_WINDOW_S,
    RECONNECT_GRACE_S,
    RECORD_FRESH_S,
    Change,
    FleetView,
)
from kvproto.messages import Heartbeat, MemberRecord, Role, State, WorkerRecord

OLD, NEW = "0000000001-a", "0000000002-b"  # epochs, in order of start


def record(worker: str = "w1", *, epoch: str = OLD, state: State = State.READY, model: str = "m") -> WorkerRecord:
    return WorkerRecord(worker, epoch, "lease", state, model, "a:1", "h", 1, (1, 1))


def beat(worker: str = "w1", *, epoch: str = OLD, state: State = State.READY) -> Heartbeat:
    return Heartbeat(worker, epoch, state)


class Clocked:
    """A view and its time. `pass_` moves the clock in small steps, as the sweeping loop would, and collects deaths."""

    def __init__(self, *workers: str) -> None:
        self.view = FleetView()
        self.now = 1000.0
        for worker in workers:
            self.record(worker)

    def record(self, worker: str = "w1", **fields: Any) -> Change:
        return self.view.on_worker_record(record(worker, **fields), 1, self.now)

    def beat(self, worker: str = "w1", **fields: Any) -> Change | None:
        return self.view.on_heartbeat(beat(worker, **fields), self.now)

    def gone(self, worker: str = "w1", *, expired: bool = False) -> Change | None:
        return self.view.on_worker_gone(worker, self.now, expired=expired)

    def pass_(self, seconds: float, *, beating: tuple[str, ...] = (), step: float = 0.1) -> list[str]:
        died: list[str] = []
        for _ in range(round(seconds / step)):
            self.now += step
            for worker in beating:
                self.beat(worker)
            died += self.view.sweep(self.now)
        return died

    @property
    def ready(self) -> list[str]:
        return [view.record.id for view in self.view.ready()]


def test_a_worker_joins_with_its_record_and_leaves_when_both_signals_are_stale() -> None:
    fleet = Clocked()
    assert fleet.record() is Change.JOINED
    assert fleet.ready == ["w1"]
    assert fleet.pass_(RECORD_FRESH_S - 0.1) == []
    assert fleet.pass_(0.2) == ["w1"]
    assert not fleet.view.is_alive("w1")
    assert fleet.view.workers["w1"].state is State.DEAD
    assert fleet.ready == []


def test_heartbeats_alone_keep_it_alive() -> None:
    """JetStream may be away for long: the record expires, the worker is well."""
    fleet = Clocked("w1")
    fleet.beat()
    assert fleet.gone(expired=True) is None
    assert fleet.pass_(60, beating=("w1",)) == []
    assert fleet.ready == ["w1"]
    assert fleet.pass_(HEARTBEAT_FRESH_S + 0.1) == ["w1"]


def test_records_alone_keep_it_alive() -> None:
    fleet = Clocked("w1")
    for _ in range(20):
        assert fleet.pass_(1.0) == []
        assert fleet.record() is Change.UPDATED
    assert fleet.ready == ["w1"]


def test_an_expired_record_without_heartbeats_is_death_at_the_next_sweep() -> None:
    fleet = Clocked("w1")
    fleet.gone(expired=True)
    assert fleet.pass_(0.1) == ["w1"]


def test_a_deleted_record_is_death_at_once_and_heartbeats_do_not_undo_it() -> None:
    fleet = Clocked("w1")
    fleet.beat()
    assert fleet.gone() is Change.LEFT
    assert fleet.ready == []
    assert fleet.beat() is None
    assert not fleet.view.is_alive("w1")
    assert fleet.gone() is None
    assert fleet.record() is Change.JOINED
    assert fleet.ready == ["w1"]


def test_a_silent_worker_that_speaks_again_joins_again() -> None:
    fleet = Clocked("w1")
    assert fleet.pass_(5) == ["w1"]
    assert fleet.beat() is Change.JOINED
    assert fleet.ready == ["w1"]


def test_a_new_epoch_is_told_and_the_old_life_is_not_heard_any_more() -> None:
    fleet = Clocked("w1")
    fleet.beat()
    assert fleet.record(epoch=NEW) is Change.NEW_EPOCH
    assert fleet.view.workers["w1"].heartbeat is None
    assert fleet.beat(state=State.DRAINING) is None
    assert fleet.view.workers["w1"].heartbeat is None
    assert fleet.ready == ["w1"]
    assert fleet.pass_(5, beating=("w1",)) == ["w1"], "heartbeats of the old life must not keep the new one alive"


def test_a_restart_after_death_is_a_join() -> None:
    fleet = Clocked("w1")
    fleet.gone()
    assert fleet.record(epoch=NEW) is Change.JOINED
    assert fleet.view.workers["w1"].record.epoch == NEW


def test_a_heartbeat_heard_before_the_record_counts_from_then() -> None:
    fleet = Clocked()
    assert fleet.beat(state=State.DRAINING) is None
    assert fleet.view.workers == {}
    fleet.now += 0.1
    fleet.record()
    assert fleet.view.workers["w1"].heartbeat == beat(state=State.DRAINING)


def test_a_heartbeat_of_an_older_life_heard_before_the_record_does_not_count() -> None:
    fleet = Clocked()
    fleet.beat(epoch=OLD)
    fleet.record(epoch=NEW)
    assert fleet.view.workers["w1"].heartbeat is None


def test_the_newest_signal_says_the_state() -> None:
    fleet = Clocked("w1")
    fleet.now += 0.1
    fleet.beat(state=State.DRAINING)
    assert fleet.ready == []
    assert fleet.view.is_alive("w1")
    assert fleet.view.with_state("w1") == dataclasses.replace(record(), state=State.DRAINING)
    fleet.now += 0.1
    fleet.record(state=State.READY)
    assert fleet.ready == ["w1"]


# ---------------------------------------------------------------------------------------------- faults of NATS


def test_mass_expiry_is_taken_to_be_a_fault_of_nats() -> None:
    fleet = Clocked("w1", "w2", "w3", "w4")
    assert fleet.pass_(RECORD_FRESH_S + 1, beating=("w1",)) == []
    assert sorted(fleet.ready) == ["w1", "w2", "w3", "w4"]
    for worker in ("w2", "w3", "w4"):
        assert fleet.record(worker) is Change.UPDATED, "nobody had left, so nobody joins"
    assert fleet.pass_(1, beating=("w1", "w2", "w3", "w4")) == []


def test_the_held_view_is_given_up_after_a_while() -> None:
    fleet = Clocked("w1", "w2", "w3", "w4")
    died = fleet.pass_(RECORD_FRESH_S + MASS_HOLD_S - 0.2, beating=("w1",))
    assert died == []
    assert sorted(fleet.pass_(0.5, beating=("w1",))) == ["w2", "w3", "w4"]
    assert fleet.ready == ["w1"]


def test_half_of_the_fleet_is_no_mass() -> None:
    fleet = Clocked("w1", "w2", "w3", "w4")
    assert sorted(fleet.pass_(RECORD_FRESH_S + 0.2, beating=("w1", "w2"))) == ["w3", "w4"]


def test_deaths_soon_after_one_another_add_up_to_a_mass() -> None:
    fleet = Clocked("w1", "w2", "w3", "w4", "w5")
    fleet.gone("w5", expired=True)
    assert fleet.pass_(0.1) == ["w5"]
    fleet.gone("w4", expired=True)
    assert fleet.pass_(0.1, beating=("w1", "w2", "w3")) == ["w4"]
    fleet.gone("w3", expired=True)
    assert fleet.pass_(HEARTBEAT_FRESH_S + 0.2, beating=("w1", "w2")) == []
    assert fleet.view.is_alive("w3")


def test_deaths_far_from_one_another_do_not() -> None:
    fleet = Clocked("w1", "w2", "w3", "w4", "w5")
    alive = ["w1", "w2", "w3", "w4", "w5"]
    while len(alive) > 1:
        dying = alive.pop()
        assert fleet.pass_(HEARTBEAT_FRESH_S + MASS_WINDOW_S + 2, beating=tuple(alive)) == [dying]


def test_a_single_worker_is_no_mass() -> None:
    assert Clocked("w1").pass_(5) == ["w1"]


def test_silence_while_disconnected_means_nothing_and_everybody_gets_grace_after() -> None:
    fleet = Clocked("w1", "w2")
    fleet.view.on_disconnected()
    assert fleet.pass_(60) == []
    fleet.view.on_reconnected(fleet.now)
    assert fleet.pass_(RECONNECT_GRACE_S - 0.2) == []
    fleet.record("w1")
    assert fleet.pass_(2) == ["w2"]
    assert fleet.ready == ["w1"]


# ---------------------------------------------------------------------------------------------- what readers rely on


def test_version_grows_with_every_change_of_who_may_take_work() -> None:
    fleet = Clocked()
    seen = [fleet.view.version]

    def changed() -> bool:
        seen.append(fleet.view.version)
        return seen[-1] > seen[-2]

    fleet.record()
    assert changed()
    fleet.record()
    fleet.beat()
    assert not changed()
    fleet.now += 0.1
    fleet.beat(state=State.DRAINING)
    assert changed()
    fleet.now += 0.1
    fleet.beat(state=State.READY)
    assert changed()
    fleet.pass_(5)
    assert changed()
    fleet.beat()
    assert changed()
    fleet.gone()
    assert changed()


def test_the_dead_are_forgotten_later() -> None:
    fleet = Clocked("w1", "w2")
    fleet.gone("w2")
    fleet.pass_(FORGET_DEAD_S - 1, beating=("w1",), step=0.5)
    assert "w2" in fleet.view.workers
    fleet.pass_(2, beating=("w1",), step=0.5)
    assert list(fleet.view.workers) == ["w1"]


def test_models_are_those_of_living_workers_and_readers_agree_on_one() -> None:
    fleet = Clocked()
    fleet.record("w3", model="a")
    fleet.record("w2", model="a", state=State.DRAINING)
    fleet.record("w1", model="b", state=State.STARTING)
    fleet.record("w4", model="c")
    fleet.gone("w4")
    assert {model: found.id for model, found in fleet.view.models().items()} == {"a": "w2"}
    assert [view.record.id for view in fleet.view.ready("a")] == ["w3"]
    assert list(fleet.view.ready("c")) == []


def member(name: str = "i1", role: Role = Role.INGRESS, *, epoch: str = OLD) -> MemberRecord:
    return MemberRecord(name, epoch, "l", State.READY, role, "h", 1, (1, 1))


class Recorded(Clocked):
    """Time passes in seconds; in each, the members named are renewed as their processes would."""

    def renew(self, seconds: int, *alive: MemberRecord) -> list[MemberRecord]:
        left: list[MemberRecord] = []
        for _ in range(seconds):
            self.now += 1.0
            for one in alive:
                self.view.on_member(one, self.now)
            left += self.view.sweep_members(self.now)
        return left


def test_other_members_live_by_their_records() -> None:
    fleet = Recorded()
    ingress, vault = member(), member("v1", Role.VAULT)
    assert fleet.view.on_member(ingress, fleet.now) is Change.JOINED
    assert fleet.view.on_member(ingress, fleet.now) is Change.UPDATED
    assert fleet.renew(3, vault) == []
    assert (Role.INGRESS, "i1") in fleet.view.members
    fleet.view.on_disconnected()
    assert fleet.renew(3, vault) == [], "who hears nothing concludes nothing"
    fleet.view._blind_until = fleet.now
    assert fleet.renew(1, vault) == [ingress]
    assert list(fleet.view.members) == [(Role.VAULT, "v1")]
    assert fleet.view.on_member(ingress, fleet.now) is Change.JOINED
    assert fleet.view.on_member(replace(ingress, epoch="later"), fleet.now) is Change.NEW_EPOCH
    gone = fleet.view.on_member_gone(Role.INGRESS, "i1", fleet.now, expired=True)
    assert gone == replace(ingress, epoch="later"), "at once, while others are renewed"
    assert fleet.view.on_member_gone(Role.INGRESS, "never seen", fleet.now, expired=True) is None
    assert fleet.view.on_member_gone(Role.VAULT, "v1", fleet.now, expired=False) == vault
    assert fleet.view.members == {}


def test_nobody_is_forgotten_while_no_record_is_renewed() -> None:
    """JetStream has no leader for half a minute: what it kept runs out at its return, then its owners come back."""
    fleet = Recorded()
    ingress, vault, dead = member(), member("v1", Role.VAULT), member("p1", Role.PLACEMENT)
    assert fleet.renew(2, ingress, vault, dead) == []
    assert fleet.renew(30) == []
    for one in (ingress, vault, dead):
        assert fleet.view.on_member_gone(one.role, one.id, fleet.now, expired=True) is None
    assert len(fleet.view.members) == 3
    assert fleet.view.on_member(vault, fleet.now) is Change.UPDATED, "it never left"
    assert fleet.renew(round(RECONNECT_GRACE_S) + 1, ingress, vault) == [dead]


def test_nobody_is_forgotten_if_jetstream_goes_again_before_all_could_come_back() -> None:
    fleet = Recorded()
    ingress, vault = member(), member("v1", Role.VAULT)
    fleet.renew(2, ingress, vault)
    assert fleet.renew(5) == []
    fleet.view.on_member(vault, fleet.now)
    assert fleet.view.on_member_gone(Role.INGRESS, "i1", fleet.now, expired=True) is None
    assert fleet.renew(30) == [], "its time to come back went by, and nobody could"
    assert fleet.renew(round(RECONNECT_GRACE_S) + 1, ingress, vault) == []
    assert fleet.renew(6, vault) == [ingress], "as ever once others are renewed"


def test_a_record_deleted_on_purpose_counts_at_any_time() -> None:
    fleet = Recorded()
    ingress, vault = member(), member("v1", Role.VAULT)
    fleet.renew(2, ingress, vault)
    fleet.renew(10)
    assert fleet.view.on_member_gone(Role.INGRESS, "i1", fleet.now, expired=False) == ingress


def test_the_last_member_of_all_is_given_up_a_little_later() -> None:
    """Its record running out shows that JetStream lives, and nobody else is there to be renewed."""
    fleet = Recorded()
    ingress = member()
    fleet.renew(2, ingress)
    fleet.renew(3)
    assert fleet.view.on_member_gone(Role.INGRESS, "i1", fleet.now, expired=True) is None
    assert fleet.renew(round(RECONNECT_GRACE_S)) == [ingress]


def test_who_reads_records_alone_buries_nobody_while_none_is_renewed() -> None:
    fleet = Clocked()
    fleet.view = FleetView(hears=False)
    fleet.record("w1")
    assert fleet.pass_(60) == []
    fleet.gone("w1", expired=True)
    fleet.record("w2")
    died: list[str] = []
    for _ in range(8):
        fleet.record("w2")
        died += fleet.pass_(1)
    assert died == ["w1"]


def test_a_reader_that_was_held_up_listens_before_it_judges() -> None:
    fleet = Clocked("w1")
    fleet.now += 5.0
    fleet.view.on_held_up(fleet.now)
    assert fleet.view.sweep(fleet.now) == []
    fleet.beat("w1")
    assert fleet.pass_(2) == []
    assert fleet.pass_(2) == ["w1"]
    fleet.view.on_disconnected()
    fleet.view.on_held_up(fleet.now)
    assert fleet.view._blind_until == float("inf"), "still disconnected"


workers = st.sampled_from(["w1", "w2", "w3"])
events = st.one_of(
    st.tuples(st.just("record"), workers, st.sampled_from([OLD, NEW])),
    st.tuples(st.just("beat"), workers, st.sampled_from([OLD, NEW])),
    st.tuples(st.just("gone"), workers, st.booleans()),
    st.tuples(st.just("pass"), st.sampled_from([0.2, 1.0, 3.0, 6.0]), st.none()),
    st.tuples(st.sampled_from(["disconnect", "reconnect"]), st.none(), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=40))
def test_whatever_happens_the_view_is_consistent(happened: list[tuple[str, Any, Any]]) -> None:
    """Joins and leaves alternate per worker, nobody dies while fresh, and only the living are ready."""
    fleet = Clocked()
    told: dict[str, bool] = {}

    def tell(worker: str, change: Change | None) -> None:
        if change is Change.JOINED:
            assert not told.get(worker, False), "joined twice"
            told[worker] = True
        elif change is Change.LEFT:
            assert told.get(worker, False), "left without having joined"
            told[worker] = False
        elif change is not None:
            assert told.get(worker, False), "changed while away"

    for what, first, second in happened:
        version = fleet.view.version
        before = set(fleet.ready)
        if what == "record":
            tell(first, fleet.record(first, epoch=second))
        elif what == "beat":
            tell(first, fleet.beat(first, epoch=second))
        elif what == "gone":
            tell(first, fleet.gone(first, expired=second))
        elif what == "disconnect":
            fleet.view.on_disconnected()
        elif what == "reconnect":
            fleet.view.on_reconnected(fleet.now)
        else:
            for _ in range(round(first / 0.2)):
                fleet.now += 0.2
                fresh = {worker for worker, view in fleet.view.workers.items() if view.is_fresh(fleet.now)}
                for worker in fleet.view.sweep(fleet.now):
                    assert worker not in fresh
                    tell(worker, Change.LEFT)
        for worker, present in told.items():
            assert fleet.view.is_alive(worker) is present
        assert set(fleet.ready) <= {worker for worker, present in told.items() if present}
        if set(fleet.ready) != before:
            assert fleet.view.version > version
