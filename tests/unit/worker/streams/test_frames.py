"""The frame book: one terminal frame per attempt, everything repeatable until it is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvchat.formats import FORMATS
from kvchat.message_builder import MessageBuilder
from kvchat.source import MessageReader
from kvfleet.worker.port.outputs import (
    SequenceFailed,
    SequenceOutput,
    SequenceStarted,
)
from kvfleet.worker.streams import frames
from kvfleet.worker.streams.frames import (
    KEEP_FINISHED_S,
    MAX_READERS,
    PAUSED_LIMIT_S,
    SCORED_PER_FRAME,
    TOKENS_PER_RESEND,
    FrameBook,
)
from kvfleet.worker.streams.milestones import MilestoneLog
from kvfleet.worker.streams.outbox import LARGEST_BATCH
from kvfleet.worker.streams.records import without_message
from kvproto import codec
from kvproto.errors import EngineFailure, Unavailable
from kvproto.messages import (
    AssistantDelta,
    AssistantMessage,
    ChoiceFinished,
    Continuation,
    Encoding,
    Failed,
    Finished,
    FinishReason,
    Frame,
    GenerateRequest,
    Progress,
    PromptScores,
    Sampling,
    Started,
    TokenLogprobs,
    Tokens,
)
from kvproto.streams.stream_assembly import StreamAssembly


def make_book() -> FrameBook:
    return FrameBook("w0", MilestoneLog("w0", "e1"))


def request(**changes: object) -> GenerateRequest:
    return GenerateRequest("r", 0, "demo", Sampling(9), **{"inbox": "_ing.x.b", "prompt_ids": (1,), **changes})  # type: ignore[arg-type]


def test_life_of_an_attempt() -> None:
    book = make_book()
    book.open(request(), "_ing.x.r.r", "public", 0.0)
    assert book.known("r", 0) is not None
    ((_, sent),) = book.add(SequenceStarted("r", 0, 7, 5, 0.25), 0.0)
    assert sent == Started("r", 0, "w0", 7, {"device": 5}, 0.25)
    book.add(Tokens("r", 0, 0, 0, (4, 5), ("a", "b")), 0.0)
    ((_, done),) = book.add(ChoiceFinished("r", 0, 0, FinishReason.STOP, 2), 1.0)
    assert done == Finished("r", 0, FinishReason.STOP, 7, 2, 5, "w0")
    assert book.add(SequenceFailed("r", 0, EngineFailure("late")), 1.0) == [], "one terminal frame only"
    assert book.running == []
    stream = StreamAssembly()
    for frame in book.repeat("r", 0, 0):
        stream.accept(frame)
    assert stream.ids == [4, 5]
    assert stream.terminal == done
    book.sweep(1.0 + KEEP_FINISHED_S + 0.1)
    assert book.known("r", 0) is None
    assert book.repeat("r", 0, 0) == []


def test_a_continued_attempt_repeats_from_its_own_start() -> None:
    book = make_book()
    book.open(request(output_ids=(7, 8, 9)), "", "public", 0.0)
    book.add(Tokens("r", 0, 0, 3, (1, 2), ("x", "y")), 0.0)
    progress, frame = book.repeat("r", 0, 4)
    assert progress == Progress("r", 0, 5)
    assert frame == Tokens("r", 0, 0, 4, (2,), ("y",))


def test_long_repeats_come_in_pieces() -> None:
    book = make_book()
    book.open(request(encoding=Encoding.FRAMES), "", "public", 0.0)
    total = 2 * TOKENS_PER_RESEND + 5
    for i in range(total):
        book.add(Tokens("r", 0, 0, i, (i,), ("",)), 0.0)
    frames = [frame for frame in book.repeat("r", 0, 0) if isinstance(frame, Tokens)]
    assert [len(frame.ids) for frame in frames] == [TOKENS_PER_RESEND, TOKENS_PER_RESEND, 5]


def test_failure_keeps_its_code_and_field() -> None:
    book = make_book()
    book.open(request(), "", "public", 0.0)
    ((_, sent),) = book.add(SequenceFailed("r", 0, EngineFailure("broke", field="prompt")), 0.0)
    assert sent == Failed("r", 0, "engine_failure", "broke", True, "prompt", 0)


def test_a_failure_keeps_when_to_come_back() -> None:
    book = make_book()
    book.open(request(), "", "public", 0.0)
    ((_, sent),) = book.add(SequenceFailed("r", 0, EngineFailure("broke", retry_after_s=2.5)), 0.0)
    assert isinstance(sent, Failed)
    assert sent.retry_after_s == 2.5


def test_outputs_of_unknown_attempts_are_dropped() -> None:
    book = make_book()
    assert book.add(Tokens("x", 0, 0, 0, (1,), ("a",)), 0.0) == []


def test_overdue_and_forgotten_pauses_are_found() -> None:
    book = make_book()
    late = book.open(request(), "", "public", 0.0)
    late.deadline = 5.0
    paused = book.open(replace(request(), request="p"), "", "public", 0.0)
    paused.paused_at = 0.0
    book.open(replace(request(), request="fine"), "", "public", 0.0)
    assert book.overdue(4.0) == []
    assert book.overdue(6.0) == [late]
    assert book.overdue(PAUSED_LIMIT_S + 1) == [late, paused]
    assert len(book.running) == 3


# ---------------------------------------------------------------------------------------------- several choices


def several(n: int, **changes: object) -> GenerateRequest:
    return request(**changes) if n == 1 else replace(request(**changes), sampling=Sampling(9, n=n))


def say(book: FrameBook, *outputs: SequenceOutput) -> list[Frame]:
    return [frame for output in outputs for _, frame in book.add(output, 0.0)]


def tokens(choice: int, index: int, *ids: int) -> Tokens:
    scores = tuple(TokenLogprobs(-float(one)) for one in ids)
    return Tokens("r", 0, choice, index, ids, tuple(str(one) for one in ids), scores)


def done(choice: int, total: int, reason: FinishReason = FinishReason.STOP) -> ChoiceFinished:
    return ChoiceFinished("r", 0, choice, reason, total)


def test_several_choices_end_one_by_one_and_the_attempt_once() -> None:
    book = make_book()
    assert book.open(several(3), "", "public", 0.0).pending == {0, 1, 2}
    assert book.pending_sequences == 3
    out = say(
        book,
        SequenceStarted("r", 0, 7, 0, 0.5, 1),
        SequenceStarted("r", 0, 7, 6, 0.7, 0),  # finds what choice 1 computed: not what was cached before
        tokens(1, 0, 11, 12),
        done(1, 2),
        tokens(0, 0, 1),
        done(0, 1, FinishReason.LENGTH),
        tokens(2, 0, 21),
        done(2, 1),
    )
    assert out == [
        Started("r", 0, "w0", 7, {}, 0.5),
        Tokens("r", 0, 1, 0, (11, 12), ("11", "12"), (TokenLogprobs(-11.0), TokenLogprobs(-12.0))),
        ChoiceFinished("r", 0, 1, FinishReason.STOP, 2),
        Tokens("r", 0, 0, 0, (1,), ("1",), (TokenLogprobs(-1.0),)),
        ChoiceFinished("r", 0, 0, FinishReason.LENGTH, 1),
        Tokens("r", 0, 2, 0, (21,), ("21",), (TokenLogprobs(-21.0),)),
        ChoiceFinished("r", 0, 2, FinishReason.STOP, 1),
        Finished("r", 0, FinishReason.LENGTH, 7, 4, 0, "w0"),
    ]
    assert book.pending_sequences == 0


def test_a_choice_that_fails_ends_the_attempt() -> None:
    book = make_book()
    book.open(several(2), "", "public", 0.0)
    failed = SequenceFailed("r", 0, EngineFailure("broke"), 1)
    (_, _, terminal) = say(book, tokens(0, 0, 1, 2), tokens(1, 0, 3), failed)
    assert terminal == Failed("r", 0, "engine_failure", "broke", True, None, 3)
    assert say(book, tokens(0, 2, 4), done(0, 3), SequenceFailed("r", 0, EngineFailure("broke"), 0)) == []
    assert book.pending_sequences == len(book.running) == 0


def test_a_continued_attempt_generates_what_has_not_ended() -> None:
    book = make_book()
    before = (Continuation((1, 2), 2), Continuation((5,), 1, FinishReason.STOP))
    record = book.open(several(3, continuations=before), "", "public", 0.0)
    assert record.pending == {0, 2}
    assert record.output_tokens == 3
    out = say(book, SequenceStarted("r", 0, 7, 0, 0.0), tokens(0, 2, 3), done(0, 3), done(2, 0))
    assert out[-1] == Finished("r", 0, FinishReason.STOP, 7, 4, 0, "w0")


def test_an_attempt_of_which_only_the_end_was_lost_is_concluded_without_the_engine() -> None:
    book = make_book()
    ended = (Continuation((1,), 1, FinishReason.STOP), Continuation((), 0, FinishReason.LENGTH))
    record = book.open(several(2, continuations=ended), "", "public", 0.0)
    assert record.pending == set()
    frames = [frame for _, frame in book.conclude(record, 7, 1.0)]
    assert frames == [Started("r", 0, "w0", 7, {}), Finished("r", 0, FinishReason.STOP, 7, 1, 0, "w0")]
    assert len(book.running) == 0


def test_what_is_repeated_restores_every_choice() -> None:
    book = make_book()
    book.open(several(2), "", "public", 0.0)
    say(book, SequenceStarted("r", 0, 7, 0, 0.0), tokens(0, 0, 1, 2), tokens(1, 0, 3), done(1, 1))
    frames = book.repeat("r", 0, 0, (1, 0))
    assert frames[0] == Progress("r", 0, 3)
    assert [(f.choice, f.index, f.ids) for f in frames if isinstance(f, Tokens)] == [(0, 1, (2,)), (1, 0, (3,))]
    say(book, tokens(0, 2, 4), done(0, 3))
    stream = StreamAssembly(2)
    for frame in book.repeat("r", 0, 0):
        stream.accept(frame)
    assert [choice.ids for choice in stream.choices] == [[1, 2, 4], [3]]
    assert stream.terminal == Finished("r", 0, FinishReason.STOP, 7, 4, 0, "w0")
    assert [f for f in book.repeat("r", 0, 2**62) if isinstance(f, Tokens)] == []


def test_repeats_with_log_probabilities_come_in_smaller_pieces() -> None:
    book = make_book()
    book.open(request(), "", "public", 0.0)
    say(book, *(tokens(0, i, i) for i in range(SCORED_PER_FRAME + 1)))
    frames = [frame for frame in book.repeat("r", 0, 0) if isinstance(frame, Tokens)]
    assert [len(frame.ids) for frame in frames] == [len(frame.logprobs) for frame in frames] == [SCORED_PER_FRAME, 1]


# ---------------------------------------------------------------------------------------------- bounds


def test_readers_and_watchers_are_bounded() -> None:
    book = make_book()
    record = book.open(request(watcher="p1"), "", "public", 0.0)
    assert record.watchers == [], "no inbox to tell"
    for number in range(1, MAX_READERS):
        book.join(record, replace(request(watcher="p1"), inbox=f"_ing.{number}.b"), f"_plc.{number}")
    with pytest.raises(Unavailable) as refused:
        book.join(record, replace(request(), inbox="_ing.more.b"), "")
    assert refused.value.retryable
    assert book.join(record, replace(request(watcher="p1"), inbox="_ing.1.b"), "") == [], "who reads already may ask"
    assert len(record.readers) == len(book.leases._leases) == MAX_READERS
    book.join(record, request(watcher="p1"), "_plc.last")
    with pytest.raises(Unavailable):
        book.join(record, request(watcher="p1"), "_plc.more")
    assert len(record.watchers) == MAX_READERS
    assert all(record.watchers)
    book.end(record, Finished("r", 0, FinishReason.STOP, 7, 0, 0, "w0"), 1.0)
    assert book.join(record, replace(request(), inbox="_ing.more.b"), ""), "what has ended everybody may read"
    assert len(record.readers) == MAX_READERS
    assert len(book.leases._leases) == 0


def test_an_attempt_ends_once_whoever_ends_it() -> None:
    book = make_book()
    record = book.open(request(), "", "public", 0.0)
    first = book.end(record, Finished("r", 0, FinishReason.STOP, 7, 0, 0, "w0"), 1.0)
    assert book.end(record, Failed("r", 0, "cancelled", ""), 2.0) == first
    assert record.finished_at == 1.0
    assert len(book.leases._leases) == 0


@pytest.mark.parametrize("scored", [False, True])
def test_what_is_kept_of_finished_ones_is_bounded_in_tokens(scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "KEEP_FINISHED_TOKENS", 10_000)
    book = make_book()
    each = 10 if scored else 1000
    for number in range(50):
        book.open(replace(request(), request=f"r{number}"), "", "public", 0.0)
        ids, text = tuple(range(each)), ("",) * each
        scores = (TokenLogprobs(-1.0, tuple(range(100)), (-1.0,) * 100),) * each if scored else ()
        book.add(SequenceStarted(f"r{number}", 0, 7, 0, 0.0), 0.0)
        book.add(Tokens(f"r{number}", 0, 0, 0, ids, text, scores), 0.0)
        book.add(ChoiceFinished(f"r{number}", 0, 0, FinishReason.STOP, each), 1.0)
    assert 8 <= len(book._finished) < 10
    assert book.known("r49", 0) is not None
    assert book.known("r0", 0) is None
    assert len(book.running) == 0
    book.sweep(100.0)
    assert len(book._finished) == book._kept == 0
    big = book.open(replace(request(), request="big"), "", "public", 0.0)
    book.add(Tokens("big", 0, 0, 0, (1,) * 20_000, ("",) * 20_000), 0.0)
    book.end(big, Finished("big", 0, FinishReason.STOP, 7, 0, 0, "w0"), 1.0)
    assert book.known("big", 0) is not None, "the last one is there however large it is"


# ---------------------------------------------------------------------------------------------- chats


def hermes(choice: int = 0) -> MessageBuilder:
    return MessageBuilder(MessageReader(FORMATS["hermes"], ("f",)), "r", choice)


PIECES = ("Well", ".\n", "<tool_call>", '{"name": "f", "arg', 'uments": {"a":', " 1}}", "</tool_call>")


def test_a_chats_tokens_say_what_they_add_to_its_message() -> None:
    book = make_book()
    book.open(request(), "", "public", 0.0, builders=(hermes(),))
    book.add(SequenceStarted("r", 0, 7, 0, 0.0), 0.0)
    sent: list[Frame] = []
    for at, piece in enumerate(PIECES):
        sent += [frame for _, frame in book.add(Tokens("r", 0, 0, at, (at,), (piece,)), 0.0)]
    ((_, done),) = book.add(ChoiceFinished("r", 0, 0, FinishReason.STOP, len(PIECES)), 1.0)
    assert isinstance(done, Finished)
    assert done.reason is FinishReason.STOP
    assert done.message is not None
    assert (done.message.finish_reason, done.message.content) == ("tool_calls", "Well.")
    assert [(one.name, one.arguments) for one in done.message.tool_calls] == [("f", '{"a": 1}')]
    *repeated, end = book.repeat("r", 0, 0)
    assert end == done
    (again,) = [frame for frame in repeated if isinstance(frame, Tokens)]
    assert again.deltas == tuple(delta for frame in sent if isinstance(frame, Tokens) for delta in frame.deltas)
    stream = StreamAssembly()
    for frame in (*book.repeat("r", 0, 0)[:2], *sent[:3]):
        stream.accept(frame)
    (rest,) = stream.accept(again)
    assert isinstance(rest, Tokens)
    assert (rest.index, rest.deltas) == (3, again.deltas[3:]), "cut where it overlaps"


def test_choice_0_that_ended_elsewhere_has_its_message_at_the_end() -> None:
    book = make_book()
    ended = Continuation((1, 2), 4, FinishReason.STOP)
    asked = replace(request(continuations=(ended, Continuation())), sampling=Sampling(9, n=2))
    builders = hermes(), hermes(1)
    builders[0].read("Well")
    book.open(asked, "", "public", 0.0, builders=builders)
    book.add(SequenceStarted("r", 0, 7, 0, 0.0), 0.0)
    book.add(Tokens("r", 0, 1, 0, (5,), ("No",)), 0.0)
    framed = book.add(ChoiceFinished("r", 0, 1, FinishReason.LENGTH, 1), 1.0)
    (_, second), (_, done) = framed
    assert isinstance(second, ChoiceFinished)
    assert second.message == AssistantMessage("length", "No")
    assert isinstance(done, Finished)
    assert done.message == AssistantMessage("stop", "Well")


def test_a_frame_without_its_message() -> None:
    message = AssistantMessage("stop", "x" * 99)
    ends: list[Frame] = [
        ChoiceFinished("r", 0, 1, FinishReason.LENGTH, 1, message=message),
        Finished("r", 0, FinishReason.STOP, 1, 1, message=message),
    ]
    for end in ends:
        bare = without_message(end)
        assert isinstance(bare, ChoiceFinished | Finished)
        assert bare.message == AssistantMessage("stop", partial=True)
        assert replace(bare, message=message) == end
    tokens = Tokens("r", 0, 0, 0, (1,), ("x",), deltas=(AssistantDelta("x"),))
    assert without_message(tokens) == replace(tokens, deltas=())
    for other in (Progress("r", 0, 1), Finished("r", 0, FinishReason.STOP, 1, 1)):
        assert without_message(other) == other


# ---------------------------------------------------------------------------------------------- the prompt's scores


def scored(count: int, first: int = 1, tops: int = 0) -> PromptScores:
    tops_of = tuple(range(tops)), (-1.0,) * tops
    return PromptScores("r", 0, first, tuple(TokenLogprobs(-float(at), *tops_of, 3) for at in range(count)))


def asking(scored: int = 0, **changes: object) -> GenerateRequest:
    return replace(request(**changes), sampling=Sampling(9, prompt_logprobs=128), scored=scored)


def joined(frames: list[Frame]) -> list[TokenLogprobs]:
    return [one for frame in frames if isinstance(frame, PromptScores) for one in frame.logprobs]


def test_scores_are_cut_so_that_no_message_is_too_small_for_them() -> None:
    book = make_book()
    book.open(asking(), "", "public", 0.0)
    out = say(book, SequenceStarted("r", 0, 2001, 0, 0.0), scored(700, 1, 128), scored(1300, 701, 128))
    assert joined(out) == [*scored(700, 1, 128).logprobs, *scored(1300, 701, 128).logprobs]
    frames = [frame for frame in out if isinstance(frame, PromptScores)]
    assert [frame.index for frame in frames][:7] == [1, 129, 257, 385, 513, 641, 701]
    assert all(len(codec.encode_frames([frame])) < LARGEST_BATCH for frame in frames)
    assert all(len(codec.encode_plain_frame(frame, as_json=True)) < 1024 * 1024 for frame in frames)


def test_scores_are_repeated_from_where_they_are_missing() -> None:
    book = make_book()
    book.open(asking(), "", "public", 0.0)
    say(book, SequenceStarted("r", 0, 301, 0, 0.0), scored(300), tokens(0, 0, 1))
    for known, expected in ((0, 300), (1, 300), (200, 101), (301, 0)):
        frames = book.repeat("r", 0, 0, (), known)
        assert [type(frame) for frame in frames[:2]] == [Progress, Started]
        assert isinstance(frames[-1], Tokens)
        assert joined(frames) == list(scored(300).logprobs)[300 - expected :]
    say(book, done(0, 1))
    assert book.known("r", 0).weight >= 300  # type: ignore[union-attr]
    assert joined(book.repeat("r", 0, 0)) == list(scored(300).logprobs)


def test_a_continued_attempt_numbers_its_scores_from_the_first_that_was_missing() -> None:
    book = make_book()
    record = book.open(asking(scored=200), "", "public", 0.0)
    out = say(book, SequenceStarted("r", 0, 301, 0, 0.0), scored(50, 200))
    assert [frame.index for frame in out if isinstance(frame, PromptScores)] == [200]
    assert record.scored == 250
    assert joined(book.repeat("r", 0, 0, (), 230)) == list(scored(50, 200).logprobs)[30:]


def test_a_reader_joins_only_where_the_scores_begin_that_it_lacks() -> None:
    book = make_book()
    record = book.open(asking(scored=200), "", "public", 0.0)
    say(book, SequenceStarted("r", 0, 301, 0, 0.0), scored(50, 200))
    with pytest.raises(Unavailable, match="its beginning is not here"):
        book.join(record, asking(scored=100, inbox="_INBOX.other"), "")
    frames = book.join(record, asking(scored=210, inbox="_INBOX.other"), "")
    assert joined(frames) == list(scored(50, 200).logprobs)[10:]
