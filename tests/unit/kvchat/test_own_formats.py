"""Messages read by what a model's own tokenizer says of them: a `response_template`, or a `response_schema`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from kvchat.formats.own import own_format
from kvchat.formats.query import query_of
from kvchat.formats.response_schema import MOST_CHARS
from kvchat.parts import ArgumentsGrew, CallBegan, Said, Thought
from kvchat.source import MessageReader

Message = tuple[str, str, list[tuple[str, Any]]]  # text, reasoning, calls of a name and its arguments
TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "sure": {"type": "boolean", "nullable": True},
            "at": {"type": ["array", "object"]},
        },
    },
    "stop": {},
}
CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": CALL,
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}  # fmt: skip
XML = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>", "repeats": True, "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": NAMED,
        },
        "content": {"close_pattern": r"<\|user\|>\s*|$"},
    },
}  # fmt: skip
GEMMA = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
            "content": "json", "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    },
}  # fmt: skip
CHANNELS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>\s*"},
        "content": {"open": "<|channel|>final<|message|>", "close_pattern": r"<\|return\|>\s*"},
        "tool_calls": {
            "open_pattern": r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary\s+json<\|message\|>",
            "close_pattern": r"<\|call\|>\s*", "repeats": True, "content": "json", "transform": NAMED,
        },
    },
}  # fmt: skip
LISTED = {
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]", "content": "json", "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}  # fmt: skip
LINES = {
    "start_anchor": "A:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+)\n", "close": "END", "repeats": True, "content": "kv-lines",
            "content_args": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": NAMED,
        },
        "content": {},
    },
}  # fmt: skip
TEMPLATES = {"qwen": QWEN, "xml": XML, "gemma": GEMMA, "channels": CHANNELS, "listed": LISTED, "lines": LINES}

FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": "object", "additionalProperties": {}}},
}
ITEM = {"type": "object", "properties": {"type": {"const": "function"}, "function": FUNCTION}}
COHERE = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string", "x-regex": r"<\|START_RESPONSE\|>(.*?)(?:<\|END_RESPONSE\|>|$)"},
        "thinking": {"type": "string", "x-regex": r"<\|START_THINKING\|>(.*?)(?:<\|END_THINKING\|>|$)"},
        "tool_calls": {
            "x-regex": r"<\|START_ACTION\|>(.*?)(?:<\|END_ACTION\|>|$)", "x-parser": "json", "type": "array",
            "x-parser-args": {
                "transform": "[*].{type: 'function', function: {name: tool_name, arguments: parameters}}"
            },
            "items": ITEM,
        },
    },
}  # fmt: skip
GLM = {
    "x-regex": r"^(?:\n?<think>\n?(?:(?P<reasoning_content>.*?\S.*?)\n?|[\s]*)</think>\s*)?"
    r"(?P<content>(?:(?!<tool_call>)[\s\S])*?)(?:\n(?=<tool_call>))?(?=(?:<tool_call>|$))"
    r"(?P<tool_calls>(?:<tool_call>(?:(?!</tool_call>)[\s\S])+</tool_call>\s*)+)?$",
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string"},
        "reasoning_content": {"type": "string"},
        "tool_calls": {
            "type": "array", "x-regex-iterator": r"<tool_call>\s*(.+?)\s*</tool_call>",
            "items": {
                "type": "object",
                "properties": {
                    "function": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "x-regex": r"^(\S+)"},
                            "arguments": {
                                "type": "object", "default": {},
                                "x-regex-key-value":
                                    r"<arg_key>(?P<key>[^<]+)</arg_key>\s*\n<arg_value>(?P<value>.*?)</arg_value>",
                                "additionalProperties": {"x-parser": "json", "x-parser-args": {"allow_non_json": True}},
                            },
                        },
                    },
                },
            },
        },
    },
}  # fmt: skip
LLAMA = {
    "x-regex": r'^(?:(?P<tool_calls>\{"name":\s*".+?",\s*"parameters":\s*.+\})|(?P<content>.*?))(?:<\|eot_id\|>|$)',
    "type": "object",
    "properties": {
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r'(\{"name":\s*".+?",\s*"parameters":\s*.+\})',
            "items": {
                "x-regex-substitutions": [[r'^(\{"name":\s*"[^"]+",\s*)"parameters":', r'\1"arguments":']],
                "x-parser": "json",
                "x-parser-args": {"transform": "{type: 'function', function: @}"},
                **ITEM,
            },
        },
    },
}
OLD_GEMMA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "thinking": {"type": "string"},
        "content": {"type": "string"},
        "tool_calls": {
            "x-regex-iterator": r"<\|tool_call>(.*?)<tool_call\|>", "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object", "x-regex": r"call\:(?P<name>\w+)(?P<arguments>\{.*\})",
                        "properties": {
                            "name": {"type": "string"},
                            "arguments": {
                                "type": "object", "x-parser": "gemma4-tool-call", "additionalProperties": {},
                            },
                        },
                    },
                },
            },
        },
    },
    "x-regex": r"(\<\|channel\>thought\n(?P<thinking>.*?)\<channel\|\>)?"
    r"(?P<tool_calls>\<\|tool_call\>.*\<tool_call\|\>)?"
    r"(?P<content>(?:(?!\<turn\|\>)(?!\<\|tool_response\>).)+)?(?:\<turn\|\>|\<\|tool_response\>)?",
}  # fmt: skip
SCHEMAS = {"cohere": COHERE, "glm": GLM, "llama": LLAMA, "old gemma": OLD_GEMMA}
ALL = TEMPLATES | SCHEMAS

PARIS = '{"city": "Paris", "days": 3}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
TAGS = "<tool_call>\n<function=weather>\n<parameter=city>\n {} \n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"  # noqa: E501
PARIS_CALL = ("weather", {"city": "Paris", "days": 3})
GOLDEN: list[tuple[str, str, str, Message]] = [  # a format, a prompt, what is written, the message
    ("qwen", "", "Hello.\n", ("Hello.", "", [])),
    ("qwen", "", f"<think>Hm.\n</think>\n\nWell.\n{HERMES}\n{HERMES}", ("Well.", "Hm.", [PARIS_CALL, PARIS_CALL])),
    ("qwen", "u<|im_start|>assistant\n<think>\n", "Hm.</think>Well.<|im_end|>", ("Well.", "Hm.", [])),
    ("qwen", "u<|im_start|>assistant\n<think>\n\n</think>\n\n", "Well.", ("Well.", "", [])),
    ("qwen", "", '<tool_call>{"name": "hack", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "hack", "arguments": {}}</tool_call>', "", [])),
    ("qwen", "", "Well.<tool_call>no JSON</tool_call> So", ("Well.<tool_call>no JSON</tool_call>So", "", [])),
    ("qwen", "", '<tool_call>{"name": "stop", "argu', ('<tool_call>{"name": "stop", "argu', "", [])),
    ("qwen", "", "a <tool_ b <thin", ("a <tool_ b <thin", "", [])),
    ("xml", "", f"Well.\n{TAGS.format('Rome')}", ("Well.", "", [("weather", {"city": "Rome", "days": 3})])),
    (
        "xml",
        "",
        "<tool_call><function=weather><parameter=wind>2.5</parameter><parameter=sure>True</parameter>"
        '<parameter=at>[1, "a"]</parameter><parameter=days>3.0</parameter></function></tool_call>',
        ("", "", [("weather", {"wind": 2.5, "sure": True, "at": [1, "a"], "days": 3})]),
    ),
    (
        "xml",
        "",
        "<tool_call><function=weather><parameter=wind>null</parameter><parameter=sure>perhaps</parameter>"
        "<parameter=at>none</parameter><parameter=days>3.5</parameter></function></tool_call>",
        ("", "", [("weather", {"wind": None, "sure": "perhaps", "at": "none", "days": "3.5"})]),
    ),
    ("xml", "", "<tool_call><function=stop>\n</function></tool_call>", ("", "", [("stop", {})])),
    (
        "gemma",
        "<|turn>model\n",
        '<|channel>thought\nHm.<channel|>Well.<|tool_call>call:weather{city:<|"|>Pa"r\\is<|"|>,days:3}<tool_call|>',
        ("Well.", "Hm.", [("weather", {"city": 'Pa"r\\is', "days": 3})]),
    ),
    (
        "channels",
        "<|start|>assistant",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistantto=functions.weather<|channel|>commentary json"
        f"<|message|>{PARIS}<|call|>",
        ("", "Hm.", [PARIS_CALL]),
    ),
    ("channels", "", "<|channel|>final<|message|>Well.<|return|>", ("Well.", "", [])),
    ("channels", "", "No channel at all.", ("No channel at all.", "", [])),
    (
        "listed",
        "",
        f'Well. [TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "stop", "arguments": {{}}}}]',
        ("Well.", "", [PARIS_CALL, ("stop", {})]),
    ),
    ("lines", "", "CALL weather\ncity: Paris\n days : 3\nnothing\nENDdone", ("done", "", [PARIS_CALL])),
    ("cohere", "", "<|START_RESPONSE|>Well.<|END_RESPONSE|>", ("Well.", "", [])),
    (
        "cohere",
        "",
        f'<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[{{"tool_name": "weather", "parameters": {PARIS}}}]',
        ("", "Hm.", [PARIS_CALL]),
    ),
    ("cohere", "", "No mark at all.", ("No mark at all.", "", [])),
    ("cohere", "", "<|START_ACTION|>no JSON<|END_ACTION|>", ("<|START_ACTION|>no JSON<|END_ACTION|>", "", [])),
    (
        "glm",
        "",
        "<think>Hm.</think>\nWell.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ("Well.", "Hm.", [PARIS_CALL]),
    ),
    ("glm", "<|assistant|><think>\n", "Hm.</think>Well.", ("Well.", "Hm.", [])),
    ("glm", "", "<tool_call>hack\n</tool_call>", ("<tool_call>hack\n</tool_call>", "", [])),
    ("llama", "", f'{{"name": "weather", "parameters": {PARIS}}}', ("", "", [PARIS_CALL])),
    ("llama", "", "It rains.", ("It rains.", "", [])),
    (
        "old gemma",
        "",
        '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        ("", "Hm.", [PARIS_CALL]),
    ),
    ("old gemma", "", "Well.<turn|>", ("Well.", "", [])),
]  # fmt: skip


def message_of(name: str, prompt: str, pieces: Iterable[str]) -> Message:
    reader = MessageReader(own_format(json.dumps(ALL[name])).parse(prompt, TOOLS), TOOLS)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegan):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        elif isinstance(part, ArgumentsGrew):
            calls[part.index][1] += part.text
    said = "".join(part.text for part in parts if isinstance(part, Said))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return said, thought, [(call, json.loads(arguments)) for call, arguments in calls]


def cut(text: str, random: Random) -> list[str]:
    at = sorted({0, len(text), *(random.randint(0, len(text)) for _ in range(random.randint(0, 12)))})
    return [text[start:end] for start, end in zip(at, at[1:])]  # noqa: B905, RUF007


@pytest.mark.parametrize(("name", "prompt", "text", "message"), GOLDEN)
def test_golden_messages(name: str, prompt: str, text: str, message: Message) -> None:
    assert message_of(name, prompt, [text]) == message
    assert message_of(name, prompt, text) == message, "letter by letter"
    for seed in range(20):
        assert message_of(name, prompt, cut(text, Random(seed))) == message


PIECES = (
    "<think>", "hm", "</think>", "\n", "Well. ", HERMES, '<tool_call>{"name": "stop", "arguments": {}}</tool_call>',
    "<|im_end|>", "<tool_", "é", "<thi", TAGS.format("Rome"), "<tool_call>\n<fun", "<|channel>thought\n", "<channel|>",
    '<|tool_call>call:weather{city:<|"|>Pa"ris<|"|>,days:3,sure:null}<tool_call|>', "<turn|>", "<|tool_response>",
    "<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>", "<|return|>",
    f"to=functions.weather<|channel|>commentary json<|message|>{PARIS}", "<|call|>",
    '[TOOL_CALLS][{"name": "stop", "arguments": {}}]', "CALL stop\n", "END", "days: 3\n",
    "<|START_RESPONSE|>", "<|START_ACTION|>", "<tool_call>stop\n</tool_call>",
)  # fmt: skip
PROMPTS = ("", "x<|im_start|>assistant\n", "x<|im_start|>assistant\n<think>\n", "<|turn>model\n", "<|start|>assistant")
WRITTEN = st.lists(st.sampled_from(PIECES), max_size=7).map("".join)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from([*TEMPLATES]), prompt=st.sampled_from(PROMPTS), text=WRITTEN, seed=st.integers(0, 999))
def test_as_transformers_reads_them(name: str, prompt: str, text: str, seed: int) -> None:
    """Of fields that come twice it keeps the last one, and it drops what is of none; here all is told. A prompt without
    the anchor is none of the message's here."""
    anchors = TEMPLATES[name]["start_anchor"]
    assume(not prompt or any(one in prompt for one in ([anchors] if isinstance(anchors, str) else anchors)))
    read = message_of(name, prompt, cut(text, Random(seed)))
    assert read == message_of(name, prompt, [text])
    tools = [{"type": "function", "function": {"name": one, "parameters": said}} for one, said in TOOLS.items()]
    try:
        told = parse_response(text, TEMPLATES[name], prefix=prompt, tools=tools)
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in told.get("tool_calls", ())]
    except (ValueError, TypeError, KeyError):
        return  # here it is text
    if all(call in TOOLS for call, _ in calls):
        assert read[2] == calls
        assert told.get("content", "") in read[0]
        assert (told.get("reasoning_content") or told.get("thinking") or "") in read[1]


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from([*SCHEMAS]), prompt=st.sampled_from(PROMPTS), text=WRITTEN, seed=st.integers(0, 999))
def test_pieces_change_no_message(name: str, prompt: str, text: str, seed: int) -> None:
    said, thought, calls = message_of(name, prompt, cut(text, Random(seed)))
    assert (said, thought, calls) == message_of(name, prompt, [text])
    assert not text or said or thought or calls


@pytest.mark.parametrize("name", ALL)
def test_text_is_told_as_it_comes_unless_a_whole_message_is_wanted(name: str) -> None:
    reader = MessageReader(own_format(json.dumps(ALL[name])).parse("", TOOLS), TOOLS)
    if name == "channels":
        reader.feed("<|channel|>final<|message|>")
    first = reader.feed("It rains in")
    assert first == ([] if name in SCHEMAS else [Said("It rains in")])
    reader.feed(" Paris.")
    reader.end()


# ---------------------------------------------------------------------------------------------- bounds


SLOW = r"(?:a|aa)+$"  # exponential where it fails
HOSTILE = "a" * 60 + "!"
SLOW_ONES: dict[str, Any] = {
    "schema": {"type": "object", "x-regex": rf"^({SLOW[:-1]})$", "properties": {"content": {"type": "string"}}},
    "iterator": {
        "type": "object",
        "properties": {
            "content": {"type": "string", "x-regex": "^(.*)$"},
            "tool_calls": {"type": "array", "x-regex-iterator": f"({SLOW})", "items": {}},
        },
    },
    "substitution": {
        "type": "object", "x-regex-substitutions": [[SLOW, "b"]],
        "properties": {"content": {"type": "string", "x-regex": "^(.*)$"}},
    },
    "open": {"start_anchor": "A:", "fields": {"tool_calls": {"open_pattern": SLOW, "close": "x"}, "content": {}}},
    "close": {"start_anchor": "A:", "fields": {"content": {"close_pattern": SLOW}}},
    "start": {"start_anchor_pattern": SLOW, "fields": {"content": {}}},
    "tags": {
        "start_anchor": "A:",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "a", "content": "xml-inline",
                "content_args": {"tag_pattern": r"(?P<key>(?:a|aa)+)(?P<value>$)"},
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SLOW_ONES)
@pytest.mark.parametrize("step", [1, 1000])
def test_what_takes_too_long_is_text(kind: str, step: int) -> None:
    began = time.process_time()
    reader = MessageReader(own_format(json.dumps(SLOW_ONES[kind])).parse(HOSTILE, TOOLS), TOOLS)
    parts = [part for at in range(0, len(HOSTILE), step) for part in reader.feed(HOSTILE[at : at + step])]
    parts += reader.feed(" And on.") + reader.end()
    assert time.process_time() - began < 5, "half a second, and what each piece brings"
    assert "".join(part.text for part in parts if isinstance(part, Said)) == f"{HOSTILE} And on."


def test_a_schema_holds_back_so_much_and_no_more() -> None:
    text = "<|START_RESPONSE|>" + "word " * (MOST_CHARS // 4)
    reader = MessageReader(own_format(json.dumps(COHERE)).parse("", TOOLS), TOOLS)
    told = [part for at in range(0, len(text), 1000) for part in reader.feed(text[at : at + 1000])]
    assert sum(len(part.text) for part in told if isinstance(part, Said)) > MOST_CHARS
    told += reader.end()
    assert "".join(part.text for part in told if isinstance(part, Said)) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"content": {"close_pattern": "(?=x)"}},
        {"content": {}, "thinking": {"open_pattern": "(?=x)", "close_pattern": "(?=x)"}},
        {"content": {}, "tool_calls": {"open_pattern": "", "close_pattern": ""}},
    ],
)
def test_anchors_of_nothing_come_to_an_end(fields: dict[str, Any]) -> None:
    said = json.dumps({"start_anchor": "A:", "fields": fields})
    for text in ("ab xx cd", "x", ""):
        reader = MessageReader(own_format(said).parse("", {}))
        parts = [part for piece in text for part in reader.feed(piece)] + reader.end()
        told = "".join(part.text for part in parts if isinstance(part, Said | Thought))
        assert told.replace(" ", "") == text.replace(" ", "")


def test_depth_is_no_fault() -> None:
    deep = "[" * 100_000
    for name, text in (
        ("qwen", f"<tool_call>{deep}</tool_call>"),
        ("cohere", f"<|START_ACTION|>{deep}<|END_ACTION|>"[:MOST_CHARS]),
        ("xml", f"<tool_call><function=weather><parameter=at>{deep}</parameter></function></tool_call>"),
    ):
        said, _, calls = message_of(name, "", [text])
        assert said == text or calls == [("weather", {"at": deep})]


# ---------------------------------------------------------------------------------------------- what is none


def read_by(parser: str, **arguments: Any) -> dict[str, Any]:
    calls = {"open": "x", "content": parser, "content_args": arguments}
    return {"start_anchor": "a", "fields": {"tool_calls": calls}}


@pytest.mark.parametrize(
    "said",
    [
        "no JSON", "5", "[]", '"x"', "null",
        {"fields": {}}, {"start_anchor": "a", "fields": []}, {"start_anchor": "", "fields": {"content": {}}},
        {"start_anchor": "a", "fields": {"content": {}}, "version": 2},
        {"start_anchor": "a", "fields": {"content": {}}, "more": 1},
        {"start_anchor": "a", "start_anchor_pattern": "a", "fields": {"content": {}}},
        {"start_anchor": "a", "fields": {"content": 5}},
        {"start_anchor": "a", "fields": {"content": {"shuts": "x"}}},
        {"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}},
        {"start_anchor": "a", "fields": {"content": {"open": []}}},
        {"start_anchor": "a", "fields": {"content": {"open": [5]}}},
        {"start_anchor": "a", "fields": {"content": {}, "thinking": {}}},
        {"start_anchor": "a", "fields": {"tool_calls": {"open": "x", "content": "yaml"}}},
        {"start_anchor": "a", "fields": {"tool_calls": {"open": "x", "content": "xml-inline"}}},
        read_by("xml-inline", tag_pattern="x"),
        read_by("json", string_delims=[5]),
        read_by("kv-lines", kv_sep=""),
        read_by("kv-lines", value_parser=5),
        {"type": "object", "x-regex": "("}, {"type": "object", "x-regex": 5}, {"type": "object", "x-mapping": {}},
        {"type": "object", "x-parser": "python"}, {"type": "object", "properties": 5},
        {"type": "object", "properties": {"content": []}}, {"type": "object", "additionalProperties": 5},
        {"type": "object", "x-regex-substitutions": 5}, {"type": "object", "x-regex-substitutions": [["("]]},
        {"type": "object", "x-parser": "json", "x-parser-args": {"transform": "a || b"}},
    ],
)  # fmt: skip
def test_what_is_neither_is_refused(said: Any) -> None:
    with pytest.raises(ValueError):
        own_format(said if isinstance(said, str) else json.dumps(said))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "x-regex": "(a)(b)"},
        {"type": "object", "x-regex": "a"},
        {"type": "array", "x-regex-iterator": "(a)"},
        {"type": "array", "x-regex": "(a)", "items": {}},
        {"type": "object", "x-regex-key-value": "(a)"},
        {"type": "object", "x-regex-substitutions": [["a", r"\9"]]},
        {"type": "object", "x-regex-substitutions": [["a", r"\g<none>"]]},
        {"type": "object", "properties": {"content": {"x-parser": "json"}}},
        {"type": "object", "properties": {"content": {"const": 5}}},
        {"type": "string"},
    ],
)
def test_a_schema_that_fits_no_text_leaves_it_text(schema: dict[str, Any]) -> None:
    reader = MessageReader(own_format(json.dumps(schema)).parse("", TOOLS), TOOLS)
    assert reader.feed("ab") + reader.end() == [Said("ab")]


@pytest.mark.parametrize(
    ("query", "value", "found"),
    [
        ("@", 5, 5),
        ("a", {"a": 1}, 1),
        ("a.b", {"a": {"b": 2}}, 2),
        ("a.b", {"a": 5}, None),
        ("'x'", 5, "x"),
        ("{type: 'f', of: @}", 5, {"type": "f", "of": 5}),
        ("[{of: @}]", 5, [{"of": 5}]),
        ("[a, @]", {"a": 1}, [1, {"a": 1}]),
        ("[*].a", [{"a": 1}, {}, {"a": 3}], [1, 3]),
        ("[*].{n: a.b, m: c}", [{"a": {"b": 1}, "c": 2}], [{"n": 1, "m": 2}]),
        ("calls[*].name", {"calls": [{"name": "x"}]}, ["x"]),
        ("[*]", [1, None, 2], [1, 2]),
        ("[*].a", "text", None),
        ('"a".b', {"a": {"b": 1}}, 1),
    ],
)
def test_queries(query: str, value: Any, found: Any) -> None:
    assert query_of(query)(value) == found


@pytest.mark.parametrize("query", ["", "a b", "a | b", "a[0]", "{a}", "{a: }", "[a", "a..b", "length(@)", None, "."])
def test_queries_beyond(query: Any) -> None:
    with pytest.raises(ValueError):
        query_of(query)
