"""What models write, as messages: whole, and in pieces of any size."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.formats import FORMATS
from kvchat.formats.think import thinking
from kvchat.parts import ArgumentsGrew, CallBegan, Part, Said, Thought
from kvchat.source import MessageReader, Parsing, PartialText

TOOLS = ("weather", "find.flights", "stop")
Parse = Callable[[PartialText], Parsing[None]]
Message = tuple[str, str, list[tuple[str, str]]]  # text, reasoning, calls of a name and its arguments

PARIS = '{"city": "Paris", "days": 3}'
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
GOLDEN: list[tuple[str, str, Message]] = [
    ("hermes", "Hello, world.\n", ("Hello, world.\n", "", [])),
    (
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
        ("", "", [("weather", PARIS)]),
    ),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "a } \\" ]"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"n": [1, {"m": null}]}, "name": "stop"}\n</tool_call>\n',
        ("Let me see.", "", [("weather", '{"city": "a } \\" ]"}'), ("stop", '{"n": [1, {"m": null}]}')]),
    ),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call>', ("", "", [("stop", "{}")])),
    ("hermes", '<tool_call>{"name": "hack", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "hack", "arguments": {}}</tool_call>', "", [])),
    ("hermes", "a < b <tool_ <tool_call> no JSON", ("a < b <tool_ <tool_call> no JSON", "", [])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', ("", "", [("weather", '{"city": "Par')])),
    ("llama", f'{{"name": "weather", "parameters": {PARIS}}}', ("", "", [("weather", PARIS)])),
    (
        "llama",
        '<|python_tag|>{"name": "stop", "parameters": {}}; {"name": "weather", "parameters": {"city": "Rome"}}',
        ("", "", [("stop", "{}"), ("weather", '{"city": "Rome"}')]),
    ),
    ("llama", "It rains {in} Paris.", ("It rains {in} Paris.", "", [])),
    ("llama", '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', "", [])),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "stop", "arguments": {{}}}}]',
     ("", "", [("weather", PARIS), ("stop", "{}")])),
    ("mistral", f"Well.[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]stop[CALL_ID]abc[ARGS]{{}}",
     ("Well.", "", [("weather", PARIS), ("stop", "{}")])),
    ("mistral", "[TOOL_CALLS]hack[ARGS]{}", ("[TOOL_CALLS]hack[ARGS]{}", "", [])),
    (
        "deepseek",
        "So.\n" + DEEPSEEK.format(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜>"
        ),
        ("So.", "", [("weather", PARIS), ("stop", "{}")]),
    ),
    ("deepseek", DEEPSEEK.format(f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"),
     ("", "", [("weather", PARIS)])),
    (
        "pythonic",
        "[weather(city='Par)is', days=3), find.flights(to=[1, {\"a\": None}], late=True), stop()]",
        ("", "", [
            ("weather", '{"city": "Par)is", "days": 3}'),
            ("find.flights", '{"to": [1, {"a": null}], "late": true}'),
            ("stop", "{}"),
        ]),
    ),
    ("pythonic", "<|python_start|>[stop()]<|python_end|>", ("", "", [("stop", "{}")])),
    ("pythonic", "[1, 2] is a list.", ("[1, 2] is a list.", "", [])),
    ("pythonic", "[weather(city=open('x'))]", ("[weather(city=open('x'))]", "", [])),
    (
        "harmony",
        "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{PARIS}<|call|>",
        ("", "I must look.", [("weather", PARIS)]),
    ),
    ("harmony", "<|channel|>final<|message|>It rains.<|return|>", ("It rains.", "", [])),
    ("harmony", "It rains.", ("It rains.", "", [])),
    # As openai-harmony 0.0.8 writes and reads them.
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look, fly.<|end|>"
        "<|start|>assistant to=functions.find.flights<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        ("I look, fly.", "Hm.", [("find.flights", "{}")]),
    ),
    ("harmony", ' to=functions.stop<|channel|>analysis<|message|>{"a": 1}<|call|>', ("", "", [("stop", '{"a": 1}')])),
    ("harmony", " to=python<|channel|>analysis code<|message|>print(1)<|call|>", ("", "print(1)", [])),
    ("harmony", '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', ('{"a": 1}', "", [])),
    ("harmony", "<|channel|>analysis<|message|>thinking and cut", ("", "thinking and cut", [])),
]  # fmt: skip


def read(parse: Parse, pieces: list[str]) -> list[Part]:
    reader = MessageReader(parse, TOOLS)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return parts + reader.end()


def message(parts: list[Part]) -> Message:
    said = thought = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case Said(text):
                said += text
            case Thought(text):
                thought += text
            case CallBegan(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsGrew(index, text):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return said, thought, calls


def cuts(text: str, seed: int) -> list[str]:
    chance, pieces = Random(seed), list[str]()
    while text:
        count = chance.choice((1, 1, 2, 3, 7, 20))
        pieces.append(text[:count])
        text = text[count:]
    return pieces


@pytest.mark.parametrize(("name", "text", "expected"), GOLDEN)
def test_golden_texts(name: str, text: str, expected: Message) -> None:
    assert message(read(FORMATS[name], [text])) == expected
    assert message(read(FORMATS[name], list(text))) == expected
    for seed in range(20):
        assert message(read(FORMATS[name], cuts(text, seed))) == expected


@pytest.mark.parametrize("name", FORMATS)
@given(st.text(alphabet="<>[]{}()\"':,;=\\ \nabtool_callweather｜▁|", max_size=60), st.integers(0, 3))
def test_any_text_is_read_and_alike_in_pieces(name: str, text: str, seed: int) -> None:
    whole = message(read(FORMATS[name], [text]))
    assert message(read(FORMATS[name], cuts(text, seed))) == whole
    if not whole[2] and not whole[1] and name not in ("deepseek", "harmony"):  # whose marks alone say nothing
        assert whole[0] == text


@pytest.mark.parametrize("cut", range(1, 75))
def test_arguments_are_told_as_they_come(cut: int) -> None:
    text = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
    reader = MessageReader(FORMATS["hermes"], TOOLS)
    told = message(reader.feed(text[:cut]))
    begins = text.index(PARIS)
    if cut > begins:
        assert told[2] == [("weather", PARIS[: cut - begins])]


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning(begun: bool) -> None:
    text = "\n<think>\nIt may rain.\n</think>\n\nIt rains."
    text = text.partition("<think>")[2] if begun else text
    for pieces in ([text], list(text), cuts(text, 1)):
        parts = read(thinking(FORMATS["hermes"], begun=begun), pieces)
        assert message(parts) == ("It rains.", "It may rain.", [])
    assert message(read(thinking(FORMATS["hermes"], begun=False), ["No thought."])) == ("No thought.", "", [])
    cut = read(thinking(FORMATS["hermes"], begun=True), ["It may"])
    assert message(cut) == ("", "It may", [])


def test_long_arguments_are_read_in_linear_time() -> None:
    arguments = json.dumps({"text": 'a "quoted" part, ' * 20_000})
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    assert message(read(FORMATS["hermes"], pieces))[2] == [("weather", arguments)]
