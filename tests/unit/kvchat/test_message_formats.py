"""Which format a chat's message is read in, and what keeps the model to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvchat.conversation import read_conversation
from kvchat.message_format import MessageFormat, format_of_message
from kvchat.parts import ArgumentsGrew, CallBegan, Said, Thought
from kvproto.chats import chat_of
from kvproto.errors import InvalidRequest
from kvproto.messages import Bundle, Grammar, GrammarForm, Sampling

OWN = json.dumps(
    {
        "start_anchor": "A:",
        "fields": {
            "thinking": {"open": "(", "close": ")"},
            "tool_calls": {
                "open_pattern": r"@(?P<name>\w+)", "close": ";", "content": "json", "repeats": True,
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
)  # fmt: skip
HERMES = "{{ messages }}A:<tool_call>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS: dict[str, Any] = {"tools": [TOOL]}
SAID = [{"role": "user", "content": "x"}]
JSON = Grammar(GrammarForm.JSON_OBJECT)


def bundle(template: str = "{{ messages }}A:", tool_format: str = "", own: str = OWN) -> Bundle:
    return Bundle("m", "{}", template, None, None, (), 1, 1, tool_format=tool_format, response_schema=own)


def format_in(of: Bundle, grammar: Grammar | None = None, **said: Any) -> MessageFormat | None:
    plan = read_conversation(chat_of(SAID, **said)).tools.plan
    return format_of_message(plan, of, {}, grammar)


@pytest.mark.parametrize("said", [{}, TOOLS, {**TOOLS, "tool_choice": "none"}, {**TOOLS, "tool_choice": "auto"}])
@pytest.mark.parametrize("template", ["{{ messages }}A:", HERMES])
def test_the_tokenizers_own_reads_what_nothing_enforces(said: dict[str, Any], template: str) -> None:
    found = format_in(bundle(template), **said)
    assert found is not None
    assert found.own == OWN
    bound = found.bind(Sampling(1), "A:")
    assert (bound.grammar, bound.skip_special_tokens) == (None, False)
    reader = found.reading("A:")()
    parts = reader.feed('(Hm.) Well. @f {"a": 1};') + reader.end()
    calls = [CallBegan(0, "f"), ArgumentsGrew(0, '{"a": 1}')]
    if said and said.get("tool_choice") != "none":
        assert parts == [Thought("Hm."), Said("Well."), *calls]
    else:
        assert parts == [Thought("Hm."), Said('Well.@f {"a": 1};')]
    assert reader.thoughts == 1


def test_the_operators_format_comes_first() -> None:
    found = format_in(bundle(tool_format="hermes"), **TOOLS)
    assert found is not None
    assert (found.own, found.tools) == ("", "hermes")
    assert format_in(bundle(tool_format="hermes")) is None


BOUND: list[dict[str, Any]] = [
    {**TOOLS, "tool_choice": "required"},
    {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {**TOOLS, "parallel_tool_calls": False},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
]


@pytest.mark.parametrize("said", BOUND)
def test_what_must_be_is_in_the_templates_format(said: dict[str, Any]) -> None:
    found = format_in(bundle(HERMES), **said)
    assert found is not None
    assert (found.own, found.tools) == ("", "hermes")
    assert found.bind(Sampling(1), "A:").grammar is not None
    with pytest.raises(InvalidRequest, match="this model's format cannot be enforced") as refused:
        format_in(bundle(), **said)
    assert refused.value.field == "tools"


def test_a_grammar_of_the_caller_is_read_as_it_was_before() -> None:
    assert format_in(bundle(), JSON) is None
    found = format_in(bundle(HERMES), JSON, **TOOLS)
    assert found is not None
    assert found.own == ""
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        format_in(bundle(), JSON, **TOOLS)


def test_tools_of_a_model_that_knows_none() -> None:
    with pytest.raises(InvalidRequest, match="chat template knows none") as refused:
        format_in(bundle(own=""), **TOOLS)
    assert refused.value.field == "tools"
    assert format_in(bundle(own="")) is None


def test_one_of_a_later_version_is_left_aside() -> None:
    assert format_in(bundle(own='{"fields": {}, "version": 9}')) is None
    found = format_in(bundle(HERMES, own='{"x-regex": "("}'), **TOOLS)
    assert found is not None
    assert (found.own, found.tools) == ("", "hermes")
