"""The judge, on histories made by hand: each promise that is broken is seen, and what nobody promises is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.checker import Verdict, check
from tests.chaos.history import Answer, End, Exchange, Happened, History, Leak, Piece, ProcessEnd, Transport
from tests.chaos.layout import Layout
from tests.chaos.recovery import felt, rows
from tests.chaos.schedule import Fault, Kind

RIGHT = Answer(("abcd",), ((1, 2, 3, 4),), ("length",), ((-0.5, -0.1, -0.2, -0.3),), 4)
PIECES = (Piece(1.1, 0, "ab", (1, 2), 0), Piece(1.3, 0, "c", (3,), 2), Piece(1.4, 0, "d", (4,), 3))
FINISHED = End(1.5, output_tokens=4)


def exchange(pieces: tuple[Piece, ...] = PIECES, ends: tuple[End, ...] = (FINISHED,), **changes: Any) -> Exchange:
    one = Exchange(0, Transport.CLIENT, "case", "numbers", "public", "plain", began=1.0, accepted_at=1.05, done_at=1.5)
    one.pieces, one.ends = list(pieces), list(ends)
    one.reasons, one.logprobs = {0: "length"}, {0: [-0.5, -0.1, -0.2, -0.3]}
    one.workers = [(1.05, "f0")]
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def fault(kind: Kind, target: str, began: float, for_s: float = 0.0) -> Happened:
    happened = Happened(Fault(0, began, kind, target, for_s, 0), began)
    happened.over_at, happened.well_at = began + for_s, began + for_s + 1.0
    return happened


def judged(one: Exchange, *faults: Happened, **others: Any) -> Verdict:
    return check(History(answers={("case", 0): RIGHT}, exchanges=[one], faults=list(faults), **others))


def words(verdict: Verdict) -> list[str]:
    return [violation.what for violation in verdict.violations]


def test_a_right_answer() -> None:
    verdict = judged(exchange())
    assert not verdict.violations
    assert verdict.counts["finished"] == 1
    assert verdict.counts["tokens"] == 4


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ends": []}, "lost"),
        ({"ends": [], "accepted_at": None}, "lost"),
        ({"ends": [], "broken": [(1.2, "i0")]}, "lost"),
        ({"ends": [FINISHED, FINISHED]}, "duplicated"),
        ({"after_end": 1}, "duplicated"),
        ({"ends": [End(1.5, "unavailable", "gone", retryable=True)]}, "error"),
        ({"pieces": [PIECES[0], PIECES[2]]}, "lost"),
        ({"pieces": [PIECES[0], PIECES[1], PIECES[1], PIECES[2]]}, "duplicated"),
        ({"pieces": [*PIECES[:2], Piece(1.4, 0, "d", (9,), 3)]}, "wrong"),
        ({"pieces": [*PIECES[:2], Piece(1.4, 0, "x", (4,), 3)]}, "wrong"),
        ({"pieces": list(PIECES[:2])}, "wrong"),
        ({"reasons": {0: "stop"}}, "wrong"),
        ({"reasons": {}}, "wrong"),
        ({"logprobs": {0: [-0.5, -0.1, -0.2]}}, "wrong"),
        ({"logprobs": {0: [-0.5, -0.1, -0.2, -0.31]}}, "wrong"),
        ({"ends": [End(1.5, output_tokens=5)]}, "wrong"),
        ({"left_at": 1.2, "pieces": [Piece(1.1, 0, "ax", (1, 9), 0)], "ends": []}, "wrong"),
    ],
)
def test_each_broken_promise_is_seen(changes: dict[str, Any], what: str) -> None:
    verdict = judged(exchange(**changes))
    assert what in words(verdict), verdict


def test_of_http_only_the_text_is_known() -> None:
    pieces = [Piece(1.1, 0, "ab"), Piece(1.2, 0, "cd")]
    answer = Answer(("abcd",), ((),), ("length",), ((-0.5, -0.1, -0.2, -0.3),))
    history = History(answers={("case", 0): answer})
    history.exchanges = [exchange(transport=Transport.CHAT, pieces=pieces)]
    assert not check(history).violations
    history.exchanges = [exchange(transport=Transport.CHAT, pieces=[*pieces, Piece(1.3, 0, "cd")])]
    assert words(check(history)) == ["wrong"]


def test_who_leaves_needs_no_end_but_what_it_had_was_right() -> None:
    verdict = judged(exchange(left_at=1.2, ends=[], pieces=[PIECES[0]]))
    assert not verdict.violations
    assert verdict.counts["left"] == 1


def test_a_bare_producer_is_told_of_its_workers_loss_in_time() -> None:
    told = exchange(transport=Transport.BARE_JSON, ends=[End(3.0, "worker_lost", retryable=True)], done_at=3.0)
    assert words(judged(told)) == ["error"], "nothing happened to its worker"
    assert words(judged(told, fault(Kind.KILL, "f1", 1.2))) == ["error"], "it was another one's"
    assert words(judged(told, fault(Kind.DRAIN, "f0", 1.2))) == ["error"], "of a drain it sees nothing"
    verdict = judged(told, fault(Kind.KILL, "f0", 1.2))
    assert not verdict.violations
    assert verdict.counts["failed_as_promised"] == 1
    unknown = exchange(transport=Transport.BARE_JSON, ends=told.ends, done_at=3.0, workers=[])
    assert not judged(unknown, fault(Kind.KILL, "f0", 1.2)).violations, "it was lost before it had begun"
    late = exchange(transport=Transport.BARE_JSON, ends=[End(9.0, "worker_lost", retryable=True)], done_at=9.0)
    assert words(judged(late, fault(Kind.KILL, "f0", 1.2))) == ["error"], "after 7.8 s"
    final = exchange(transport=Transport.BARE_JSON, ends=[End(3.0, "worker_lost", retryable=False)])
    assert words(judged(final, fault(Kind.KILL, "f0", 1.2))) == ["error"], "it does not say that it may be tried again"


def test_what_a_bare_producer_is_not_promised_is_counted() -> None:
    gap = exchange(transport=Transport.BARE_MSGPACK, pieces=[PIECES[0], PIECES[2]])
    assert words(judged(gap)) == ["lost"]
    verdict = judged(gap, fault(Kind.NATS_KILL, "nats", 1.2, 0.5))
    assert not verdict.violations
    assert verdict.counts["exempt"] == 1
    endless = exchange(transport=Transport.BARE_MSGPACK, ends=[], done_at=40.0)
    both = (fault(Kind.KILL, "f0", 1.2), fault(Kind.KILL, "p0", 1.3))
    assert not judged(endless, *both).violations, "who watched its worker died too"
    assert words(judged(endless, both[0])) == ["lost"]


def test_clients_that_resume_are_promised_everything() -> None:
    faults = [fault(Kind.NATS_KILL, "nats", 1.2, 0.5), fault(Kind.KILL, "f0", 1.2), fault(Kind.KILL, "i0", 1.3)]
    for transport in (Transport.CLIENT, Transport.CHAT, Transport.GENERATE):
        assert words(judged(exchange(transport=transport, ends=[], done_at=40.0), *faults)) == ["lost"]


def test_processes_leaks_and_tenants() -> None:
    ends = [
        ProcessEnd(1.0, "f0", -9, "kill"),
        ProcessEnd(1.0, "f1", 0, "drain", 0.4),
        ProcessEnd(1.0, "r0", 1, "", said="AssertionError"),
        ProcessEnd(1.0, "i0", -9, "drain", 30.0),
    ]
    others = {"leaks": [Leak("f0", "2 blocks held")], "crossed": ["16 tokens"], "unwell": ["not ready: f0"]}
    verdict = judged(exchange(), ends=ends, **others)
    assert sorted(words(verdict)) == ["crossed", "leak", "process", "process", "process"]
    assert "AssertionError" in verdict.violations[0].told


def test_a_mismatch_names_the_token_so_that_a_near_tie_can_be_told() -> None:
    verdict = judged(exchange(pieces=[PIECES[0], Piece(1.3, 0, "x", (7,), 2), PIECES[2]]))
    (mismatch,) = verdict.mismatches
    assert (mismatch.index, mismatch.expected, mismatch.got) == (2, (1, 2, 3, 4), (1, 2, 7, 4))


def test_recovery_is_the_longest_pause_of_the_streams_that_were_hit() -> None:
    pieces = [Piece(1.1, 0, "ab", (1, 2), 0), Piece(2.6, 0, "c", (3,), 2), Piece(2.7, 0, "d", (4,), 3)]
    hit = exchange(pieces=pieces, done_at=2.8, ends=[End(2.8, output_tokens=4)])
    other = exchange(workers=[(1.05, "f1")], done_at=9.0, pieces=[PIECES[0], Piece(8.0, 0, "cd", (3, 4), 2)])
    slow = exchange(behaviour="reads slowly", pieces=[PIECES[0], Piece(8.0, 0, "cd", (3, 4), 2)], done_at=9.0)
    history = History(exchanges=[hit, other, slow], faults=[fault(Kind.KILL, "f0", 1.2)])
    found = felt(history.faults[0], history, Layout.of())
    assert found.streams == 1
    assert found.gap_s == pytest.approx(1.5)
    (row,) = rows(history, Layout.of())
    assert (row.kind, row.role, row.count, row.streams) == (Kind.KILL, "worker", 1, 1)
    assert felt(fault(Kind.KILL, "f0", 20.0), history, Layout.of()).gap_s is None, "it hit nobody"
