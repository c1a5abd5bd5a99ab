"""The page and the picture of a run: every fault has its promise, and what was found stands there."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.chaos.checker import check
from tests.chaos.history import Exchange, Happened, History, Piece, Transport
from tests.chaos.layout import Layout
from tests.chaos.report import page, promise
from tests.chaos.schedule import TRAITS, Fault, Kind, Schedule
from tests.chaos.timeline import throughput, timeline

LAYOUT = Layout.of()


def history_of(schedule: Schedule) -> History:
    history = History()
    for fault in schedule.faults:
        history.faults.append(Happened(fault, fault.at_s, fault.at_s + fault.for_s, fault.at_s + fault.for_s + 1.5))
    one = Exchange(0, Transport.CHAT, "case", "demo", "public", "plain", 1.0, accepted_at=1.1, done_at=9.0)
    one.pieces = [Piece(1.2, 0, "a"), Piece(4.0, 0, "b"), Piece(4.5, 0, "c", (1, 2, 3))]
    history.exchanges.append(one)
    return history


@pytest.mark.parametrize("kind", Kind)
def test_every_fault_has_a_promise(kind: Kind) -> None:
    for role in TRAITS[kind].roles:
        assert promise(kind, role.value)


def test_the_page_tells_what_was_found() -> None:
    schedule = Schedule.of(1, 10.0, 60, LAYOUT)
    history = history_of(schedule)
    text = page(1, 10 / 60, history, LAYOUT, check(history), 2)
    assert "--faults 60 --seed 1`" in text
    assert "| **requests lost** | **1** |" in text, "it never ended"
    for fault in schedule.faults:
        assert f"| {fault.kind.value} |" in text
    assert "2.80 s" in text, "the longest pause"
    assert "| 1.5 s |" in text, "all are ready again after that"


def test_a_run_of_vllm_servers_has_a_page_of_its_own() -> None:
    layout = Layout.of_vllm()
    history = history_of(Schedule.of(1, 10.0, 60, layout))
    text = page(1, 10 / 60, history, layout, check(history), 0)
    assert text.startswith("# Reliability with vLLM\n")
    assert "--engine vllm --minutes" in text
    assert f"| {Kind.VLLM_HANG.value} | worker |" in text


def test_the_picture() -> None:
    history = history_of(Schedule.of(1, 10.0, 60, LAYOUT))
    drawn = ElementTree.fromstring(timeline(history, LAYOUT))
    titles = [title.text or "" for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("nats: " in title for title in titles) >= 3
    assert throughput(history) == {1: 1, 4: 4}


def test_a_run_in_which_nothing_happened_is_drawn_too() -> None:
    history = History(faults=[Happened(Fault(0, 0.0, Kind.KILL, "f0", 0.0, 0), 0.0)])
    ElementTree.fromstring(timeline(history, LAYOUT))
    assert "# Reliability" in page(1, 1.0, history, LAYOUT, check(history), 0)
