"""The frame book: one terminal frame per attempt, everything repeatable until it is forgotten."""

from __future__ import annotations

from dataclasses import replace

from kvproto.errors import EngineFailure
from kvproto.messages import (
    Encoding,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Progress,
    Sampling,
    Started,
    Tokens,
)
from kvproto.stream_assembly import StreamAssembly
from services.worker.frames import KEEP_FINISHED_S, PAUSED_LIMIT_S, TOKENS_PER_RESEND, FrameBook
from services.worker.outputs import SequenceFailed, SequenceFinished, SequenceStarted, SequenceTokens


def request(**changes: object) -> GenerateRequest:
    return GenerateRequest("r", 0, "demo", Sampling(9), "_ing.x.b", prompt_ids=(1,), **changes)  # type: ignore[arg-type]


def test_life_of_an_attempt() -> None:
    book = FrameBook("w0")
    book.open(request(), "_ing.x.r.r")
    assert book.knows("r", 0)
    sent = book.add(SequenceStarted("r", 0, 7, 5, 0, 0.25), 0.0)
    assert sent is not None
    assert sent[1] == Started("r", 0, "w0", 7, {"device": 5}, 0.25)
    book.add(SequenceTokens("r", 0, 0, (4, 5), ("a", "b")), 0.0)
    done = book.add(SequenceFinished("r", 0, FinishReason.STOP, 7, 2, 5), 1.0)
    assert done is not None
    assert isinstance(done[1], Finished)
    assert book.add(SequenceFailed("r", 0, EngineFailure("late")), 1.0) is None, "one terminal frame only"
    assert book.running == []
    stream = StreamAssembly()
    for frame in book.repeat("r", 0, 0):
        stream.accept(frame)
    assert stream.ids == [4, 5]
    assert stream.terminal == done[1]
    book.sweep(1.0 + KEEP_FINISHED_S + 0.1)
    assert len(book) == 0
    assert book.repeat("r", 0, 0) == []


def test_a_continued_attempt_repeats_from_its_own_start() -> None:
    book = FrameBook("w0")
    book.open(request(output_ids=(7, 8, 9)), "")
    book.add(SequenceTokens("r", 0, 3, (1, 2), ("x", "y")), 0.0)
    progress, frame = book.repeat("r", 0, 4)
    assert progress == Progress("r", 0, 5)
    assert frame == Tokens("r", 0, 0, 4, (2,), ("y",))


def test_long_repeats_come_in_pieces() -> None:
    book = FrameBook("w0")
    book.open(request(encoding=Encoding.FRAMES), "")
    total = 2 * TOKENS_PER_RESEND + 5
    for i in range(total):
        book.add(SequenceTokens("r", 0, i, (i,), ("",)), 0.0)
    frames = [frame for frame in book.repeat("r", 0, 0) if isinstance(frame, Tokens)]
    assert [len(frame.ids) for frame in frames] == [TOKENS_PER_RESEND, TOKENS_PER_RESEND, 5]


def test_failure_keeps_its_code_and_field() -> None:
    book = FrameBook("w0")
    book.open(request(), "")
    sent = book.add(SequenceFailed("r", 0, EngineFailure("broke", field="prompt")), 0.0)
    assert sent is not None
    assert sent[1] == Failed("r", 0, "engine_failure", "broke", True, "prompt", 0)


def test_outputs_of_unknown_attempts_are_dropped() -> None:
    book = FrameBook("w0")
    assert book.add(SequenceTokens("x", 0, 0, (1,), ("a",)), 0.0) is None


def test_overdue_and_forgotten_pauses_are_found() -> None:
    book = FrameBook("w0")
    late = book.open(request(), "")
    late.deadline = 5.0
    paused = book.open(replace(request(), request="p"), "")
    paused.paused_at = 0.0
    book.open(replace(request(), request="fine"), "")
    assert book.overdue(4.0) == []
    assert book.overdue(6.0) == [late]
    assert book.overdue(PAUSED_LIMIT_S + 1) == [late, paused]
    assert book.running_count == 3
