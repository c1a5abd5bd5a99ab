"""A producer's chat: the one text that it becomes, and the key of its turns."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kvproto import codec
from kvproto.chats import FIELDS, chat_of, conversation_of
from kvproto.errors import CodecError, InvalidRequest, Unavailable
from kvproto.messages import Chat, GenerateRequest, ProducerRequest, Sampling, State, WorkerRecord
from kvproto.schema import MAX_DEPTH

HELLO = [{"role": "user", "content": "Hellö"}]
REQUEST = GenerateRequest("r", 0, "m", Sampling(1), "_INBOX.x", chat=chat_of(HELLO))


def test_all_that_is_said_is_in_the_text() -> None:
    said: dict[str, Any] = {
        "messages": HELLO, "tools": [{"type": "function"}], "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning_effort": "low", "chat_template_kwargs": {"x": None},
    }  # fmt: skip
    chat = chat_of(**said, unix_s=5)
    assert json.loads(chat.text) == said
    assert chat.unix_s == 5
    assert set(said) == set(FIELDS) <= set(ProducerRequest.__dataclass_fields__)
    assert json.loads(chat_of(HELLO).text) == {"messages": HELLO}
    assert "ö" in chat.text, "as few bytes as can be"


@pytest.mark.parametrize("bad", [float("inf"), b"x", {1}, object(), "\ud800"])
@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_what_is_no_json_is_refused_by_name(bad: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match="is no JSON") as refused:
        chat_of(HELLO, **{name: {"a": [bad]}})
    assert refused.value.field == name


def test_all_turns_of_a_chat_have_one_key() -> None:
    system, first, second = ("system", "Be."), ("user", "One"), ("user", "Two")
    key = conversation_of((system, first))
    assert key == conversation_of((system, first, ("assistant", "x"), second))
    others = [(first,), (system, second), (("system", "Be"), ("user", ".One")), (system,)]
    assert len({key, *map(conversation_of, others)}) == 5


def test_the_key_is_of_roles_and_texts_however_they_are_said() -> None:
    plain = chat_of([{"role": "system", "content": "Be."}, {"role": "user", "content": "One"}])
    parts = [{"type": "text", "text": "On"}, {"type": "text", "text": "e"}]
    said = chat_of([{"role": "developer", "content": "Be."}, {"role": "user", "content": parts}])
    assert plain.conversation == said.conversation == conversation_of((("system", "Be."), ("user", "One")))


@pytest.mark.parametrize(
    "messages", ["x", 5, None, [], [5], [{}], [{"role": 5}], [{"role": "user", "content": {"text": []}}], [[1]]]
)
def test_a_key_is_had_of_anything(messages: Any) -> None:
    """The worker refuses it."""
    assert chat_of(messages).conversation.startswith("chat-")


def test_a_worker_that_renders_none_gets_none() -> None:
    record = WorkerRecord("w", "e", "l", State.READY, "m", "a", "h", 1, codec.supported_versions())
    with pytest.raises(Unavailable, match="renders no chats") as refused:
        codec.version_of_offer(record, REQUEST)
    assert refused.value.field == "messages"
    assert codec.version_of_offer(replace(record, chats=True), REQUEST) == codec.VERSION
    assert codec.version_of_offer(record, replace(REQUEST, chat=None, prompt="x")) == codec.VERSION


def test_what_may_be_anything_is_not_nested_for_ever() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH):
        deep = [deep]
    for as_json in (False, True):
        request = ProducerRequest(messages=deep)
        data = codec.encode_plain(request, as_json=as_json)
        assert codec.decode_plain(ProducerRequest, data, as_json=as_json) == request
        data = codec.encode_plain(ProducerRequest(messages=HELLO, tools=[deep]), as_json=as_json)
        with pytest.raises(InvalidRequest, match="at most 64") as refused:
            codec.decode_plain(ProducerRequest, data, as_json=as_json)
        assert (refused.value.code, refused.value.field) == ("invalid_request", "tools")


def test_a_chat_tells_the_text_that_its_worker_tokenises() -> None:
    assert REQUEST.text == REQUEST.chat.text if REQUEST.chat else None
    assert codec.decode(GenerateRequest, codec.encode(REQUEST)) == REQUEST
    assert Chat("{}").unix_s == 0


@pytest.mark.parametrize("rows", [5, [{}], [{}, 5], [{}, {"content": 5}], [{}, {"tool_calls": [{"index": -1}]}]])
def test_deltas_that_are_none_are_refused_by_name(rows: Any) -> None:
    row = [2, "r", 0, 0, 0, [1, 2], ["a", "b"], [], rows]
    with pytest.raises(CodecError) as refused:
        codec.decode_frames(bytes((codec.VERSION,)) + msgpack.packb([row]))
    assert str(refused.value.field).startswith("tokens.deltas")
