"""A chat as a worker takes it: the same prompt on every worker, and a message that goes on where it was."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.serve.chat_intake import ChatIntake, TakenChat
from kvfleet.worker.text.model_text import ModelText
from kvproto.chats import chat_of
from kvproto.errors import InvalidRequest
from kvproto.messages import Bundle, Continuation, FinishReason, GenerateRequest, Sampling

BUNDLE = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16)
TEXT = ModelText(Tokenizer.from_str(BUNDLE.tokenizer_json))
SAID = [{"role": "user", "content": "Who goes there?"}]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
CALL = 'Well. <tool_call>\n{"name": "f", "arguments": {"a": "ü🙂"}}\n</tool_call>'


def taken(bundle: Bundle = BUNDLE, messages: Any = SAID, said: dict[str, Any] = TOOLS, **fields: Any) -> TakenChat:
    chat = chat_of(messages, **said, unix_s=1_763_700_000)
    request = GenerateRequest("r", 0, "demo", Sampling(9), "_INBOX.x", **fields)
    return ChatIntake(bundle, TEXT).take(request, chat)


def test_a_prompt_is_what_the_template_writes() -> None:
    told = taken()
    assert TEXT.generated((), told.ids, skip_special=False).endswith("<|user|>Who goes there?<|end|><|assistant|>")
    assert told.sampling.grammar is None
    assert not told.sampling.skip_special_tokens
    bound = taken(said={**TOOLS, "tool_choice": "required"})
    assert bound.ids == told.ids
    assert bound.sampling.grammar is not None
    plain = taken(said={})
    assert plain.sampling == Sampling(9)
    assert len(plain.ids) < len(told.ids)


@pytest.mark.parametrize("count", range(0, 40, 3))
def test_what_an_earlier_attempt_said_is_read(count: int) -> None:
    ids = TEXT.encode(CALL, begins=False, field="x")
    stream = TEXT._detokenizer.whole.stream(taken().ids)
    pieces = [stream.push(token) for token in ids]
    count = min(count, len(ids))
    told = taken(output_ids=ids[:count], text_sent=len("".join(pieces[:count])))
    (builder,) = told.builders
    for piece in pieces[count:]:
        builder.read(piece)
    message = builder.end(FinishReason.STOP)
    assert (message.content, message.finish_reason) == ("Well.", "tool_calls")
    assert [(one.name, one.arguments) for one in message.tool_calls] == [("f", '{"a": "ü🙂"}')]


def test_each_choice_has_its_own_beginning() -> None:
    one, other = (TEXT.encode(word, begins=False, field="x") for word in ("Hark", "Hush now"))
    request = GenerateRequest(
        "r", 1, "demo", Sampling(9, n=3), "_INBOX.x",
        continuations=(Continuation(one, 4), Continuation(other, 8, FinishReason.LENGTH)),
    )  # fmt: skip
    told = ChatIntake(BUNDLE, TEXT).take(request, chat_of(SAID))
    assert [builder.end(FinishReason.STOP).content for builder in told.builders] == ["Hark", "Hush now", ""]


def test_the_date_is_the_chats_wherever_it_is_rendered() -> None:
    dated = replace(BUNDLE, chat_template="{{ strftime_now('%d %b %Y %H:%M') }}{{ messages[0].content }}")
    told = taken(dated, said={})
    assert TEXT.generated((), told.ids, skip_special=False).startswith("21 Nov 2025 04:40")


def test_the_tokenizers_own_format_reads_it() -> None:
    own = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"@(?P<name>\w+)", "close": ";", "content": "json",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }  # fmt: skip
    (builder,) = taken(replace(BUNDLE, response_schema=json.dumps(own))).builders
    builder.read('Well. @f {"a": 1};')
    assert [(one.name, one.arguments) for one in builder.end(FinishReason.STOP).tool_calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("change", "messages", "field"),
    [
        ({"chat_template": None}, SAID, "model"),
        ({"chat_template": "{% if %}"}, SAID, "model"),
        ({"chat_template": "{{ raise_exception('no') }}"}, SAID, "messages"),
        ({"chat_template": "{{ 'x'[:0] }}"}, SAID, "messages"),
        ({"chat_template": "{{ 1 // 0 }}"}, SAID, "messages"),
        ({"chat_template": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"}, SAID, "messages"),
        ({"chat_template": "{{ range(999999) | list }}"}, SAID, "messages"),
        ({"chat_template": "{{ messages[9].content }}"}, SAID, "messages"),
        ({}, [{"role": "user"}], "messages[0].content"),
        ({}, "text", "messages"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(change: dict[str, Any], messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        taken(replace(BUNDLE, **change), messages, said={})
    assert refused.value.field == field
