"""Frames in any order, repeated, lost or of an old attempt: every token once, in order, before the terminal frame."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvproto.messages import Failed, Finished, FinishReason, Frame, Started, Tokens
from kvproto.stream_assembly import StreamAssembly


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
    assert stream.chars == len("<0><1><2>")


def test_terminal_waits_for_the_tokens_it_counts() -> None:
    stream = started_stream()
    assert stream.accept(finished(2)) == []
    assert stream.missing() == 0
    assert stream.accept(tokens(1)) == []
    out = stream.accept(tokens(0))
    assert [type(f).__name__ for f in out] == ["Tokens", "Tokens", "Finished"]
    assert stream.missing() is None


def test_failed_does_not_wait() -> None:
    stream = started_stream()
    assert stream.accept(tokens(5)) == []
    assert stream.missing() == 0
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
        assert stream.missing() is None or stream.missing() == len(stream.ids)
    assert text_of(out) == "".join(f"<{i}>" for i in range(total))
    assert stream.ids == list(range(total))
    assert isinstance(out[0], Started)
    assert isinstance(out[-1], Finished)
    assert sum(isinstance(f, Finished) for f in out) == 1


def test_a_lost_started_is_asked_for_before_anything_is_delivered() -> None:
    stream = StreamAssembly()
    assert stream.accept(tokens(0)) == []
    assert stream.accept(finished(1)) == []
    assert stream.missing() == 0
    out = stream.accept(Started("r", 0, "w", 3, {}))
    assert [type(f).__name__ for f in out] == ["Started", "Tokens", "Finished"]
