"""Stop strings across token borders, against cutting the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from engine_rig import relaxed
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.text import text_stream
from kvfleet.worker.text.text_stream import NOTHING, StopStrings, StopWatch, TextStream


class Spelling:
    """A detokenizer stream whose ids are code points; id 0 is half of the character that the next id completes."""

    def __init__(self) -> None:
        self.pending = False

    def push(self, token: int) -> str:
        self.pending = token == 0
        return "" if self.pending else chr(token)

    def skip(self, ids: Sequence[int]) -> str | None:
        return None if ids[-1] == 0 else "".join(chr(token) for token in ids if token)

    def flush(self) -> str:
        return "\ufffd" if self.pending else ""

    def fork(self) -> Spelling:
        other = Spelling()
        other.pending = self.pending
        return other


def stream(*stops: str) -> TextStream:
    return TextStream(Spelling(), StopStrings(stops))


def generate(text: TextStream, word: str) -> tuple[str, list[int]]:
    """Push until stopped or over; text and ids that left."""
    out, ids = "", []
    for token in map(ord, word):
        released = text.push(token)
        out += "".join(released.text)
        ids += released.ids
        if text.stop:
            break
    released = text.finish()
    return out + "".join(released.text), ids + list(released.ids)


@relaxed
@given(st.text("ab", max_size=30), st.lists(st.text("ab", max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_to_be_completed(word: str, stops: list[str]) -> None:
    text, ids = generate(stream(*stops), word)
    wanted = [s for s in stops if s]
    for end in range(len(word) + 1):
        starts = [word[:end].find(s) for s in wanted if s in word[:end]]
        if starts:
            assert text == word[: min(starts)]
            assert len(ids) == end
            return
    assert text == word
    assert len(ids) == len(word)


@relaxed
@given(st.text("ab", min_size=1, max_size=30), st.text("ab", min_size=1, max_size=4))
def test_nothing_leaves_that_may_begin_a_stop_string(word: str, stop: str) -> None:
    text, out = stream(stop), ""
    for end, token in enumerate(map(ord, word), 1):
        out += "".join(text.push(token).text)
        if text.stop:
            return
        assert word[:end].startswith(out)
        held = {at for at in range(end) if stop.startswith(word[at:end])}
        assert len(out) <= min(held, default=end)


@relaxed
@given(
    st.text("ab\0", max_size=20),
    st.one_of(st.just(""), st.text("ab", min_size=1, max_size=6)),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_replayed_stream_goes_on_exactly(word: str, stop: str, cut: int, replayed: int) -> None:
    """Another worker goes on after any released token, however few of them it looks at one by one: ids and text
    continue as if nothing had happened."""
    whole_text, whole_ids = generate(stream(stop), word)
    cut = min(cut, len(whole_ids))
    first, sent_text, sent_ids = stream(stop), "", []
    for token in map(ord, word):
        if len(sent_ids) >= cut or first.stop:
            break
        released = first.push(token)
        sent_text += "".join(released.text)
        sent_ids += released.ids
    second = stream(stop)
    with patch.object(text_stream, "REPLAYED_IDS", replayed):
        second.replay(sent_ids, len(sent_text))
    assert second.next_index == len(sent_ids)
    if second.stop:
        assert sent_text == whole_text
        return
    rest_text, rest_ids = generate(second, word[len(sent_ids) :])
    assert sent_text + rest_text == whole_text
    assert sent_ids + rest_ids == whole_ids


def test_replay_after_any_token_even_of_a_held_group() -> None:
    """The client may cut a group of ids anywhere; text that it lacks follows with the next id."""
    text = stream("xyz")
    text.replay([ord("a"), ord("x")], text_sent=1)  # "x" may begin the stop string: its text was not sent
    released = text.push(ord("b"))
    assert released == ((ord("b"),), ("xb",), ())


def test_replay_of_more_text_than_ids_released() -> None:
    text = stream("xyz")
    text.replay([ord("a"), ord("x")], text_sent=2)
    assert text.push(ord("b")) == ((ord("b"),), ("b",), ())


def test_a_long_replay_looks_at_few_ids_one_by_one() -> None:
    decoder, pushed = Spelling(), 0
    push = decoder.push

    def counted(token: int) -> str:
        nonlocal pushed
        pushed += 1
        return push(token)

    decoder.push = counted  # type: ignore[method-assign]
    text = TextStream(decoder, StopStrings(("xyz",)))
    ids = [ord("a")] * 100_000 + [ord("x")]
    text.replay(ids, len(ids) - 1)
    assert pushed <= 2 * text_stream.REPLAYED_IDS
    assert text.push(ord("y")) == NOTHING
    assert text.push(ord("b")) == ((ord("y"), ord("b")), ("xy", "b"), ())


def test_an_id_is_held_while_its_character_is_incomplete() -> None:
    text = stream()
    assert text.push(0) == NOTHING
    assert text.push(ord("é")) == ((0, ord("é")), ("", "é"), ())
    text.push(0)
    assert text.finish() == ((0,), ("\ufffd",), ())
    assert text.finish() == NOTHING


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
@relaxed
def test_a_beams_watch_stops_where_its_text_does(word: str, stops: list[str]) -> None:
    """And beams that part watch each for itself."""
    text, watch = stream(*stops), StopWatch(Spelling(), StopStrings(stops))  # type: ignore[arg-type]
    for token in map(ord, word):
        other = watch.after(ord("a"))
        text.push(token)
        before, watch = watch, watch.after(token)
        assert watch.stopped == bool(text.stop)
        assert before.after(ord("a")).stopped == other.stopped
        if watch.stopped:
            break
