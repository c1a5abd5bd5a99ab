"""Frames in any order, repeated, lost or of an old attempt: every token once, in order, before the terminal frame."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvproto.messages import (
    ChoiceFinished,
    Continuation,
    Failed,
    Finished,
    FinishReason,
    Frame,
    Moved,
    PromptScores,
    Started,
    TokenLogprobs,
    Tokens,
)
from kvproto.streams.stream_assembly import StreamAssembly


def tokens(index: int, count: int = 1, attempt: int = 0) -> Tokens:
    ids = tuple(range(index, index + count))
    return Tokens("r", attempt, 0, index, ids, tuple(f"<{i}>" for i in ids))


def finished(total: int, attempt: int = 0) -> Finished:
    return Finished("r", attempt, FinishReason.LENGTH, 3, total)


def started_stream() -> StreamAssembly:
    stream = StreamAssembly()
    stream.accept(Started("r", 0, "w", 3, {}))
    return stream


def text_of(frames: list[Frame]) -> str:
    return "".join("".join(f.text) for f in frames if isinstance(f, Tokens))


def test_in_order() -> None:
    stream = StreamAssembly()
    out = stream.accept(Started("r", 0, "w", 3, {}))
    for i in range(3):
        out += stream.accept(tokens(i))
    out += stream.accept(finished(3))
    assert [type(f).__name__ for f in out] == ["Started", "Tokens", "Tokens", "Tokens", "Finished"]
    assert stream.choices[0].chars == len("<0><1><2>")


def test_terminal_waits_for_the_tokens_it_counts() -> None:
    stream = started_stream()
    assert stream.accept(finished(2)) == []
    assert stream.missing() == (0,)
    assert stream.accept(tokens(1)) == []
    out = stream.accept(tokens(0))
    assert [type(f).__name__ for f in out] == ["Tokens", "Tokens", "Finished"]
    assert stream.missing() is None


def test_failed_does_not_wait() -> None:
    stream = started_stream()
    assert stream.accept(tokens(5)) == []
    assert stream.missing() == (0,)
    failed = Failed("r", 0, "worker_lost", "", retryable=True, output_tokens=9)
    assert stream.accept(failed) == [failed]


def test_old_attempts_are_fenced_off() -> None:
    stream = started_stream()
    stream.accept(tokens(0))
    stream.begin(1)
    assert stream.accept(tokens(1)) == []
    assert stream.accept(finished(1)) == []
    assert stream.fenced == 2
    out = stream.accept(tokens(1, attempt=1))
    assert stream.ids == [0, 1]
    assert len(out) == 1


def test_nothing_after_the_terminal() -> None:
    stream = started_stream()
    stream.accept(finished(0))
    assert stream.accept(tokens(0)) == []


def test_started_is_delivered_once_over_all_attempts() -> None:
    stream = StreamAssembly()
    first = Started("r", 0, "w", 3, {"device": 2})
    assert stream.accept(first) == [first]
    assert stream.accept(first) == []
    stream.begin(1)
    assert stream.accept(replace(first, attempt=1)) == []


@given(data=st.data(), total=st.integers(0, 40))
def test_any_order_with_repeats_and_overlaps(data: st.DataObject, total: int) -> None:
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=30))
    frames: list[Frame] = [tokens(i) for i in range(total)]
    frames += [tokens(a, min(n, total - a)) for a, n in cuts if a < total]
    frames += [tokens(i, attempt=3) for i in range(0, total, 5)]  # of another attempt
    frames += [Started("r", 0, "w", 3, {}), finished(total)]
    order = data.draw(st.permutations(frames))
    stream = StreamAssembly()
    out: list[Frame] = []
    for frame in order:
        out += stream.accept(frame)
        assert stream.missing() is None or stream.missing() == (len(stream.ids),)
    assert text_of(out) == "".join(f"<{i}>" for i in range(total))
    assert stream.ids == list(range(total))
    assert isinstance(out[0], Started)
    assert isinstance(out[-1], Finished)
    assert sum(isinstance(f, Finished) for f in out) == 1


def test_a_lost_started_is_asked_for_before_anything_is_delivered() -> None:
    stream = StreamAssembly()
    assert stream.accept(tokens(0)) == []
    assert stream.accept(finished(1)) == []
    assert stream.missing() == (0,)
    out = stream.accept(Started("r", 0, "w", 3, {}))
    assert [type(f).__name__ for f in out] == ["Started", "Tokens", "Finished"]


# ---------------------------------------------------------------------------------------------- several choices


def of(choice: int, index: int, count: int = 1, attempt: int = 0) -> Tokens:
    ids = tuple(100 * choice + i for i in range(index, index + count))
    scores = tuple(TokenLogprobs(float(-one)) for one in ids)
    return Tokens("r", attempt, choice, index, ids, tuple(f"<{i}>" for i in ids), scores)


def ended(choice: int, total: int, attempt: int = 0) -> ChoiceFinished:
    return ChoiceFinished("r", attempt, choice, FinishReason.STOP, total)


@given(data=st.data(), totals=st.lists(st.integers(0, 12), min_size=2, max_size=4))
def test_each_choice_is_in_order_whatever_the_order_of_frames(data: st.DataObject, totals: list[int]) -> None:
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(1, 5)), max_size=20))
    frames: list[Frame] = [of(c, i) for c, total in enumerate(totals) for i in range(total)]
    frames += [of(c, i, min(n, totals[c] - i)) for c, i, n in cuts if c < len(totals) and i < totals[c]]
    frames += [ended(c, total) for c, total in enumerate(totals)] * 2
    frames += [of(len(totals), 0), ended(len(totals), 1), of(0, 0, attempt=3)]  # of no such choice or attempt
    frames += [Started("r", 0, "w", 3, {}), finished(sum(totals))]
    stream = StreamAssembly(len(totals))
    out: list[Frame] = []
    for frame in data.draw(st.permutations(frames)):
        out += stream.accept(frame)
        assert stream.missing() in (None, stream.next_indices)
        assert stream.is_waiting == (stream.missing() is not None)
    assert isinstance(out[0], Started)
    assert isinstance(out[-1], Finished)
    for c, total in enumerate(totals):
        mine = [f for f in out if isinstance(f, Tokens | ChoiceFinished) and f.choice == c]
        assert mine.pop() == ended(c, total)
        assert [one for f in mine for one in f.ids] == [100 * c + i for i in range(total)]  # type: ignore[union-attr]
        assert [-s.logprob for f in mine for s in f.logprobs] == [100 * c + i for i in range(total)]  # type: ignore[union-attr]
        assert stream.choices[c].chars == sum(len(f"<{100 * c + i}>") for i in range(total))


def started_choices(n: int) -> StreamAssembly:
    stream = StreamAssembly(n)
    stream.accept(Started("r", 0, "w", 3, {}))
    return stream


def test_the_end_waits_for_the_end_of_every_choice() -> None:
    stream = started_choices(2)
    stream.accept(of(0, 0))
    assert stream.accept(ended(0, 1)) == [ended(0, 1)]
    assert stream.accept(of(1, 0)) == [of(1, 0)]
    assert stream.accept(finished(2)) == []
    assert stream.missing() == (1, 1), "all tokens are here, but not why choice 1 ended"
    assert stream.accept(ended(1, 1)) == [ended(1, 1), finished(2)]
    assert stream.missing() is None


def test_a_gap_of_one_choice_holds_no_other_up() -> None:
    stream = started_choices(2)
    assert stream.accept(of(0, 1)) == []
    assert stream.accept(of(1, 0)) == [of(1, 0)]
    assert stream.missing() == (0, 1)
    assert stream.accept(of(0, 0)) == [of(0, 0), of(0, 1)]
    assert stream.missing() is None


def test_a_next_attempt_goes_on_after_what_is_here_and_leaves_what_has_ended() -> None:
    stream = started_choices(3)
    assert stream.continuations() == ()
    for frame in (of(0, 0, 2), of(1, 0), ended(1, 1), of(0, 5)):
        stream.accept(frame)
    stream.begin(1)
    assert stream.continuations() == (
        Continuation((0, 1), len("<0><1>")),
        Continuation((100,), len("<100>"), FinishReason.STOP),
        Continuation(),
    )
    assert stream.accept(ended(0, 2)) == [], "fenced off"
    out = [f for frame in (of(0, 2, 1, 1), ended(0, 3, 1), ended(1, 1, 1), of(2, 0, 1, 1), ended(2, 1, 1),
                           finished(5, 1)) for f in stream.accept(frame)]  # fmt: skip
    assert out == [of(0, 2, 1, 1), ended(0, 3, 1), of(2, 0, 1, 1), ended(2, 1, 1), finished(5, 1)]


def test_one_choice_needs_no_continuations() -> None:
    stream = started_stream()
    stream.accept(tokens(0))
    assert stream.continuations() == ()


# ---------------------------------------------------------------------------------------------- hand-over


def test_moved_waits_for_the_tokens_its_attempt_has() -> None:
    stream = started_stream()
    stream.accept(tokens(0))
    moved = Moved("r", 0, 3)
    assert stream.accept(moved) == []
    assert stream.is_moving
    assert stream.missing() == (1,)
    out = stream.accept(tokens(1, 2))
    assert out[-1] is stream.terminal is moved
    assert not stream.is_moving


def test_moved_is_settled_where_they_will_not_come() -> None:
    stream = StreamAssembly()
    stream.accept(tokens(0))
    moved = Moved("r", 0, 3)
    assert stream.accept(moved) == []
    stream.settle()
    assert stream.terminal is moved
    assert stream.missing() is None or stream.terminal is not None
    stream.begin(1)
    assert stream.accept(Moved("r", 1, 0)) != [], "nothing of this one is missing"


# ---------------------------------------------------------------------------------------------- the prompt's scores

PROMPT = 9


def scores(index: int, count: int = 1, attempt: int = 0) -> PromptScores:
    return PromptScores("r", attempt, index, tuple(TokenLogprobs(-float(one)) for one in range(index, index + count)))


def scored(out: list[Frame]) -> list[float]:
    return [one.logprob for f in out if isinstance(f, PromptScores) for one in f.logprobs]


@given(data=st.data(), total=st.integers(0, 4))
def test_scores_come_once_in_order_and_before_all_tokens_whatever_the_order(data: st.DataObject, total: int) -> None:
    cuts = data.draw(st.lists(st.tuples(st.integers(1, PROMPT - 1), st.integers(1, 5)), max_size=9))
    frames: list[Frame] = [scores(at) for at in range(1, PROMPT)]
    frames += [scores(at, min(count, PROMPT - at)) for at, count in cuts]
    frames += [tokens(at) for at in range(total)]
    frames += [Started("r", 0, "w", PROMPT, {}), finished(total)]
    stream = StreamAssembly(scores=True)
    out: list[Frame] = []
    for frame in data.draw(st.permutations(frames)):
        out += stream.accept(frame)
        assert stream.is_waiting == (stream.missing() is not None)
    kinds = [type(f) for f in out]
    assert kinds == sorted(kinds, key=[Started, PromptScores, Tokens, Finished].index)
    assert scored(out) == [-float(one) for one in range(1, PROMPT)]
    assert [f.index for f in out if isinstance(f, Tokens)] == list(range(total))
    assert isinstance(stream.terminal, Finished)


def test_a_later_attempt_brings_the_scores_that_are_missing_and_no_other() -> None:
    stream = StreamAssembly(scores=True)
    out = [*stream.accept(Started("r", 0, "w", PROMPT, {})), *stream.accept(scores(1, 3)), *stream.accept(scores(6))]
    assert stream.scored == 4
    assert stream.has_begun
    stream.begin(1)
    out += stream.accept(scores(5, 4, attempt=0))  # of the old one
    out += stream.accept(tokens(0, attempt=1))
    assert stream.missing() == (0,)
    for frame in (Started("r", 1, "v", PROMPT, {}), scores(3, 3, 1), scores(6, 3, 1), finished(1, 1)):
        out += stream.accept(frame)
    assert scored(out) == [-float(one) for one in range(1, PROMPT)]
    assert [type(f).__name__ for f in out[-2:]] == ["Tokens", "Finished"]


def test_it_goes_on_after_the_scores_that_its_caller_has() -> None:
    stream = StreamAssembly(scores=True)
    stream.resume((), PROMPT)
    out = [*stream.accept(Started("r", 0, "w", PROMPT, {})), *stream.accept(tokens(0)), *stream.accept(finished(1))]
    assert [type(f).__name__ for f in out] == ["Started", "Tokens", "Finished"]


def test_scores_that_nobody_wants_are_dropped() -> None:
    stream = StreamAssembly()
    stream.resume((), PROMPT)
    assert stream.accept(scores(1)) == []
    out = [*stream.accept(Started("r", 0, "w", PROMPT, {})), *stream.accept(scores(1)), *stream.accept(tokens(0))]
    assert [type(f).__name__ for f in out] == ["Started", "Tokens"]
    assert stream.scored == 0
