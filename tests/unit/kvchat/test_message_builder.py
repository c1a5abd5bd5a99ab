"""A choice's message as deltas and whole, in pieces of any size, and after what an earlier attempt said."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.formats import FORMATS
from kvchat.formats.think import thinking
from kvchat.message_builder import MessageBuilder, call_id
from kvchat.source import MessageReader, Parsing, PartialText
from kvproto.messages import AssistantCall, AssistantCallDelta, AssistantDelta, AssistantMessage, FinishReason

TEXT = (
    "<think>Hm, rain?</think>\nLet me see.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>{"name": "stop"}</tool_call>'
)
CALLS = (
    AssistantCall(call_id("r", 1, 0), "weather", '{"city": "Paris"}'),
    AssistantCall(call_id("r", 1, 1), "stop", "{}"),
)
MESSAGE = AssistantMessage("tool_calls", "Let me see.", "Hm, rain?", CALLS)


def builder() -> MessageBuilder:
    return MessageBuilder(MessageReader(thinking(FORMATS["hermes"], begun=False), ("weather", "stop")), "r", 1)


def joined(deltas: Iterable[AssistantDelta]) -> tuple[str, str, list[list[str]]]:
    content = reasoning = ""
    calls: list[list[str]] = []
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning_content
        for part in delta.tool_calls:
            if part.name:
                assert part.index == len(calls)
                calls.append([part.id, part.name, ""])
            calls[part.index][2] += part.arguments
    return content, reasoning, calls


@given(st.lists(st.integers(0, len(TEXT)), max_size=30))
def test_deltas_join_to_the_message(cuts: list[int]) -> None:
    at = sorted({0, *cuts, len(TEXT)})
    one = builder()
    deltas = [one.read(TEXT[start:end]) for start, end in pairwise(at)]
    assert one.end(FinishReason.STOP) == MESSAGE
    assert joined(deltas) == (
        MESSAGE.content, MESSAGE.reasoning_content, [[call.id, call.name, call.arguments] for call in CALLS]
    )  # fmt: skip


@pytest.mark.parametrize("cut", range(len(TEXT)))
def test_what_was_read_at_once_is_as_if_it_came_in_pieces(cut: int) -> None:
    """The next attempt reads what its reader has, and its deltas go on there."""
    first, second = builder(), builder()
    deltas = [first.read(character) for character in TEXT[:cut]]
    second.read(TEXT[:cut])
    deltas += [second.read(character) for character in TEXT[cut:]]
    assert second.end(FinishReason.STOP) == MESSAGE
    assert joined(deltas)[0] == MESSAGE.content
    assert [call[2] for call in joined(deltas)[2]] == [call.arguments for call in CALLS]


def test_one_piece_may_end_a_call_and_begin_the_next() -> None:
    one = builder()
    one.read('<tool_call>{"name": "weather", "arguments": {"a":')
    delta = one.read(' 1}}</tool_call><tool_call>{"name": "stop", "arguments": {"b": 2')
    assert delta.tool_calls == (
        AssistantCallDelta(0, arguments=" 1}"),
        AssistantCallDelta(1, call_id("r", 1, 1), "stop", '{"b": 2'),
    )


@pytest.mark.parametrize(
    ("text", "reason", "told"),
    [
        ("It rains.", FinishReason.STOP, "stop"),
        ("It rains.", FinishReason.LENGTH, "length"),
        ('<tool_call>{"name": "weather", "arguments": {"ci', FinishReason.LENGTH, "length"),
        ('<tool_call>{"name": "stop"}', FinishReason.STOP, "tool_calls"),
        ('<tool_call>{"name": "unknown"}</tool_call>', FinishReason.STOP, "stop"),
    ],
)
def test_why_it_ended(text: str, reason: FinishReason, told: str) -> None:
    one = builder()
    one.read(text)
    assert one.end(reason).finish_reason == told


def test_a_formats_fault_is_text(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(source: PartialText) -> Parsing[None]:
        yield from source.say_until(("!",))
        raise RecursionError("a format's bug")

    one = MessageBuilder(MessageReader(breaks), "r", 0)
    assert one.read("Well").content == "Well"
    one.read("! And")
    one.read(" so on.")
    assert one.end(FinishReason.STOP) == AssistantMessage("stop", "Well! And so on.")
    assert "goes on as text" in caplog.text
