"""Milestones: every attempt says accepted once and ended once, whatever way it goes; a bounded log of them."""

from __future__ import annotations

import pytest

from kvfleet.worker.port.outputs import SequenceFailed, SequenceStarted
from kvfleet.worker.streams.frames import FrameBook
from kvfleet.worker.streams.milestones import KEPT, PER_MESSAGE, MilestoneLog
from kvproto import codec
from kvproto.errors import Cancelled, DeadlineExceeded, EngineFailure, KvfleetError
from kvproto.messages import (
    ChoiceFinished,
    Continuation,
    Failed,
    FinishReason,
    GenerateRequest,
    Milestone,
    Milestones,
    Moved,
    Passed,
    Sampling,
    Tokens,
)

ME = ("acme", "r", 3)


class Book:
    """A frame book and what it notes."""

    def __init__(self) -> None:
        self.log = MilestoneLog("w0", "e1")
        self.frames = FrameBook("w0", self.log)

    def open(self, n: int = 1, now: float = 10.0, **changes: object) -> object:
        request = GenerateRequest("r", 3, "demo", Sampling(9, n=n), "_ing.x.b", prompt_ids=(1,), **changes)  # type: ignore[arg-type]
        return self.frames.open(request, "", "acme", now)

    def said(self) -> list[Milestone]:
        message = self.log.take(0.0, 0.0)
        return list(message.items) if message else []


def tokens(index: int = 0, choice: int = 0) -> Tokens:
    return Tokens("r", 3, choice, index, (7,), ("x",))


def test_an_attempt_that_finishes() -> None:
    book = Book()
    book.open()
    for output, now in (
        (SequenceStarted("r", 3, 7, 5, 0.5), 10.75),  # told with its first step
        (tokens(0), 10.75),
        (tokens(1), 11.0),
        (ChoiceFinished("r", 3, 0, FinishReason.STOP, 2), 12.0),
        (SequenceFailed("r", 3, EngineFailure("late")), 13.0),
    ):
        book.frames.add(output, now)
    assert book.said() == [
        Milestone(*ME, Passed.ACCEPTED),
        Milestone(*ME, Passed.STARTED, 0.5, prompt_tokens=7, cached={"device": 5}),
        Milestone(*ME, Passed.FIRST_TOKEN, 0.75),
        Milestone(*ME, Passed.ENDED, 2.0, output_tokens=2),
    ]
    assert book.said() == []


@pytest.mark.parametrize("error", [EngineFailure("broke"), Cancelled("enough"), DeadlineExceeded("late")])
@pytest.mark.parametrize("ran", [False, True])
def test_an_attempt_that_fails_says_its_code(error: KvfleetError, ran: bool) -> None:
    book = Book()
    book.open()
    if ran:
        book.frames.add(SequenceStarted("r", 3, 7, 0, 0.0), 10.0)
        book.frames.add(tokens(), 10.0)
    for _ in range(2):
        book.frames.add(SequenceFailed("r", 3, error), 11.0)
    said = book.said()
    assert [one.passed for one in said if one.passed is not Passed.STARTED] == (
        [Passed.ACCEPTED, Passed.FIRST_TOKEN, Passed.ENDED] if ran else [Passed.ACCEPTED, Passed.ENDED]
    )
    assert said[-1] == Milestone(*ME, Passed.ENDED, 1.0, output_tokens=int(ran), code=error.code)


def test_an_attempt_that_the_loop_ends_says_so() -> None:
    book = Book()
    record = book.open()
    book.frames.end(record, Moved("r", 3, 0), 11.0)  # drained
    book.frames.add(SequenceFailed("r", 3, Cancelled("let go")), 11.0)
    assert book.said()[1:] == [Milestone(*ME, Passed.ENDED, 1.0, code="moved")]
    book = Book()
    record = book.open()
    book.frames.end(record, Failed("r", 3, "deadline_exceeded", "late", output_tokens=4), 11.0)  # overdue
    assert book.said()[1:] == [Milestone(*ME, Passed.ENDED, 1.0, output_tokens=4, code="deadline_exceeded")]


def test_an_attempt_of_which_only_the_end_was_lost_passes_all_but_a_token() -> None:
    book = Book()
    ended = (Continuation((1, 2), 2, FinishReason.STOP), Continuation((3,), 1, FinishReason.LENGTH))
    record = book.open(2, continuations=ended)
    book.frames.conclude(record, 7, 10.0)
    assert book.said() == [
        Milestone(*ME, Passed.ACCEPTED),
        Milestone(*ME, Passed.STARTED, prompt_tokens=7),
        Milestone(*ME, Passed.ENDED, output_tokens=3),
    ]


def test_several_choices_are_one_attempt() -> None:
    book = Book()
    book.open(2)
    for output in (
        SequenceStarted("r", 3, 7, 0, 0.0, 1),
        SequenceStarted("r", 3, 7, 7, 0.0, 0),
        tokens(choice=1),
        tokens(choice=0),
        ChoiceFinished("r", 3, 1, FinishReason.STOP, 1),
        ChoiceFinished("r", 3, 0, FinishReason.STOP, 1),
    ):
        book.frames.add(output, 10.0)
    said = book.said()
    assert [one.passed for one in said] == [Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED]
    assert (said[1].cached, said[3].output_tokens) == ({}, 2)


def test_the_oldest_give_way_and_are_counted() -> None:
    log = MilestoneLog("w0", "e1", kept=3)
    for at in range(5):
        log.add(Milestone("acme", f"r{at}", 0, Passed.ACCEPTED))
    assert (len(log), log.dropped_total) == (3, 2)
    message = log.take(0.0, 0.0)
    assert message is not None
    assert [item.request for item in message.items] == ["r2", "r3", "r4"]


def test_no_message_is_larger_than_nats_takes_and_all_of_a_full_log_come_in_order() -> None:
    """With names as long as the wire lets them be."""
    log = MilestoneLog("w" * 64, "e" * 256)
    names = [f"{at:05}".ljust(256, "\u20ac") for at in range(KEPT)]
    for name in names:
        log.add(Milestone("t" * 64, name, 2**62, Passed.ACCEPTED))
        log.add(Milestone("t" * 64, name, 2**62, Passed.ENDED, 1 / 3, code="c" * 64))
    assert len(log) == KEPT
    heard: list[str] = []
    while (message := log.take(0.0, 0.0)) is not None:
        data = codec.encode(message)
        assert len(data) < 1_000_000
        assert len(message.items) == PER_MESSAGE
        heard += [item.request for item in message.items]
    assert heard == [name for name in names[KEPT // 2 :] for _ in range(2)]
    assert codec.decode(Milestones, data).worker == "w" * 64


def test_what_was_taken_lately_can_be_taken_back() -> None:
    log = MilestoneLog("w0", "e1")
    for at in range(6):
        log.add(Milestone("acme", f"r{at}", 0, Passed.ACCEPTED))
        if at % 2:
            assert log.take(float(at), sure_until=-10.0) is not None
    log.add(Milestone("acme", "r6", 0, Passed.ACCEPTED))
    log.take_back(since=3.0)
    again = log.take(7.0, sure_until=-10.0)
    assert again is not None
    assert [one.request for one in again.items] == ["r2", "r3", "r4", "r5", "r6"]
    assert again.first == 2
    log.take_back(since=6.0)
    assert len(log) == 5
    assert log.take(8.0, sure_until=8.0) is not None
    assert log.take(9.0, sure_until=9.0) is None
    log.take_back(since=0.0)
    assert not log, "it was sure to have arrived"


def test_what_gave_way_leaves_a_gap_in_the_numbers() -> None:
    log = MilestoneLog("w0", "e1", kept=2)
    log.add(Milestone("acme", "r0", 0, Passed.ACCEPTED))
    assert log.take(0.0, 0.0) is not None
    for at in range(1, 5):
        log.add(Milestone("acme", f"r{at}", 0, Passed.ACCEPTED))
    log.take_back(since=0.0)
    said = log.take(1.0, 0.0)
    assert said is not None
    assert (said.first, [one.request for one in said.items]) == (3, ["r3", "r4"])
