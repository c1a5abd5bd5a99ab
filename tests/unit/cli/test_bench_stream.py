"""Streams as servers send them, cut anywhere: tokens, their times, usage, ends and errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.cli.bench.answer_stream import AnswerStream, Meter

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
END = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": None}]}


def stream(*events: Any, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + (one if isinstance(one, bytes) else orjson.dumps(one)) + end for one in events)


def read(*pieces: bytes) -> AnswerStream:
    """Each piece a second after the one before."""
    answer = AnswerStream(Meter())
    for number, piece in enumerate(pieces):
        answer.feed(piece, float(number))
    return answer


WHOLE = stream(ROLE, said("a"), said("b"), said("c"), END, USAGE, b"[DONE]")


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_a_stream_is_the_same_wherever_it_is_cut(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(WHOLE)]
    answer = read(*(WHOLE[low:high] for low, high in pairwise(at)))
    assert (answer.texts, answer.finished, answer.done, answer.broken) == (["a", "b", "c"], True, True, "")
    assert answer.count("completion_tokens") == 3
    assert answer.count("prompt_tokens_details", "cached_tokens") == 4
    assert answer.times == sorted(answer.times)
    assert len(answer.times) == 3


def test_times_are_those_of_the_bytes_and_a_role_is_no_token() -> None:
    answer = read(stream(ROLE), stream(said("a")), stream(said("b"), said("c")), stream(END), stream(USAGE))
    assert answer.times == [1.0, 2.0, 2.0]
    assert answer.last == 3.0  # usage is no part of the answer


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"text": "a"}]},
        {"choices": [{"delta": {"reasoning_content": "a"}}]},
        {"choices": [{"delta": {"reasoning": "a"}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]},
    ],
)
def test_text_of_any_kind_is_a_token(event: dict[str, Any]) -> None:
    assert len(read(stream(event)).times) == 1


def test_comments_names_and_carriage_returns_are_passed_over() -> None:
    answer = read(b": ping\r\n\r\nevent: x\r\nid: 4\r\n" + stream(said("a"), b"[DONE]", end=b"\r\n\r\n"))
    assert (answer.texts, answer.done, answer.broken) == (["a"], True, "")


@pytest.mark.parametrize("data", [b"{half", b"7", b"[1]", b'{"choices": 7}', b'{"choices": [[]]}', b'{"usage": 7}'])
def test_what_is_no_event_of_this_form_is_told(data: bytes) -> None:
    assert "an event" in read(stream(data)).broken


def test_the_server_s_error_is_told() -> None:
    assert read(stream({"error": {"message": "out of memory"}})).error == "out of memory"
    assert read(stream({"error": "busy"})).error == "busy"


@pytest.mark.parametrize("usage", [{}, *({"prompt_tokens_details": one} for one in (None, 7, {"cached_tokens": "x"}))])
def test_what_is_not_told_is_none(usage: dict[str, Any]) -> None:
    answer = read(stream({"choices": [], "usage": usage}))
    assert answer.count("prompt_tokens_details", "cached_tokens") is None
