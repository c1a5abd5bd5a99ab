"""How an embedded fleet sees its processes end, and ends itself: with real processes, and no NATS."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvfleet.cli.embedded.autoscaler import LocalAutoscaler
from kvfleet.cli.embedded.fleet import EmbeddedFleet
from kvfleet.cli.embedded.processes import Child, StopRequest, spawn
from kvfleet.cli.operator.operator_login import Login

STAYS = "exec sleep 600"
FAILS = "exit 3"


def a_process(name: str, does: str = STAYS) -> Child:
    return spawn(name, ["sh", "-c", does])


def an_autoscaler() -> LocalAutoscaler:
    return LocalAutoscaler(Login("nats://127.0.0.1:1"), "kvf", ["demo"], lambda model: a_process("late"), [])


@contextmanager
def a_fleet(*workers: Child) -> Iterator[EmbeddedFleet]:
    fleet = EmbeddedFleet(workers=list(workers))
    try:
        yield fleet
    finally:
        fleet.stop()


@contextmanager
def knowing(autoscaler: LocalAutoscaler, fleet: EmbeddedFleet) -> Iterator[None]:
    """It knows them, and its thread finds no NATS."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        autoscaler.login = Login(f"nats://127.0.0.1:{silent.getsockname()[1]}")
        autoscaler.workers = fleet.workers
        autoscaler.thread.start()
        try:
            yield
        finally:
            autoscaler.stopping.set()


def watched(fleet: EmbeddedFleet, autoscaler: LocalAutoscaler | None) -> list[str]:
    """Who was forgotten; returns with the first one."""
    forgotten: list[str] = []
    stopping = StopRequest()
    limit = threading.Timer(20, stopping.set)
    limit.start()

    def forget(worker: Child) -> None:
        forgotten.append(worker.name)
        stopping.set()

    fleet.autoscaler = autoscaler
    fleet.watch(stopping, forget)
    limit.cancel()
    return forgotten


def test_whoever_fails_while_it_drains_does_not_come_back() -> None:
    autoscaler = an_autoscaler()
    with a_fleet(a_process("w0"), a_process("w1", FAILS)) as fleet, knowing(autoscaler, fleet):
        fleet.workers[1].draining = True
        assert watched(fleet, autoscaler) == ["w1"]
        assert [one.name for one in fleet.workers] == ["w0"]
        assert not any(one.draining for one in fleet.workers)
        assert autoscaler.paused_until == 0.0  # it says nothing about the next one


def test_whoever_fails_otherwise_is_started_again_until_it_is_given_up() -> None:
    autoscaler = an_autoscaler()
    with a_fleet(a_process("w0"), a_process("w1", FAILS)) as fleet, knowing(autoscaler, fleet):
        failing = fleet.workers[1]
        assert watched(fleet, autoscaler) == ["w1"]
        assert len(failing.restarts) == 3
        assert autoscaler.paused_until > 0


def test_whoever_was_drained_by_hand_is_forgotten_too() -> None:
    with a_fleet(a_process("w0"), a_process("w1", "exit 0")) as fleet:
        assert watched(fleet, None) == ["w1"]


def test_a_drained_worker_s_engine_ends_with_it() -> None:
    drained = a_process("w1", "exit 0")
    drained.engine = a_process("vLLM of w1")
    with a_fleet(a_process("w0"), drained) as fleet:
        assert watched(fleet, None) == ["w1"]
        assert drained.engine.given_up
        drained.engine.process.wait(20)


def test_a_worker_whose_engine_keeps_ending_is_given_up_with_it() -> None:
    autoscaler = an_autoscaler()
    worker = a_process("w1")
    worker.engine = a_process("vLLM of w1", "exit 0")
    with a_fleet(a_process("w0"), worker) as fleet, knowing(autoscaler, fleet):
        assert watched(fleet, autoscaler) == ["w1"]
        assert len(worker.engine.restarts) == 3  # also after an exit status of 0
        assert not worker.running


def test_a_worker_that_cannot_be_started_costs_nobody_else() -> None:
    def no_room(model: str) -> Child:
        raise OSError("no room")

    workers: list[Child] = []
    autoscaler = LocalAutoscaler(Login("nats://127.0.0.1:1"), "kvf", ["demo"], no_room, workers)
    autoscaler.wanted.extend(["demo", "demo"])
    autoscaler.maintain()
    assert workers == []
    assert not autoscaler.wanted
    assert autoscaler.paused_until > 0


def test_processes_end_before_the_asking_thread_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    autoscaler = an_autoscaler()
    with a_fleet(a_process("w0")) as fleet, knowing(autoscaler, fleet):
        seen: list[tuple[bool, bool]] = []
        join = threading.Thread.join

        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            if thread.name == "autoscaler":
                seen.append((any(one.running for one in fleet), thread.is_alive()))
                assert timeout is not None
                assert timeout < 1.0
            join(thread, timeout)

        monkeypatch.setattr(threading.Thread, "join", joined)
        fleet.autoscaler = autoscaler
        fleet.stop()
    assert seen == [(False, True)]
    assert autoscaler.thread.daemon  # it holds up nobody's end


def test_a_signal_may_come_at_any_line_of_what_waits_for_it() -> None:
    """As its handler runs: in the middle, on the same thread. A threading.Event would wait for its own lock."""
    stopping = StopRequest()

    def handler(*_: object) -> object:
        stopping.set()
        return handler

    sys.settrace(handler)
    try:
        assert stopping.wait(0.0)
    finally:
        sys.settrace(None)
    assert stopping.is_set
