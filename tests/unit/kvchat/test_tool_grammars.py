"""Whatever is drawn by a grammar of tools is read as calls of them, with arguments of their schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from kvchat.formats import FORMATS, deepseek, harmony
from kvchat.parts import ArgumentsGrew, CallBegan, Said
from kvchat.source import MessageReader
from kvchat.tool_grammar import Dialect, Tool, after_thought, grammar_of
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar, GrammarForm
from kvsampling.grammar import Grammars, Matcher

WORDS = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>")
WORDS.add_special_tokens([AddedToken(one, special=True) for one in ("[TOOL_CALLS]", "[ARGS]", *HARMONY)])
SPECIAL = {one.content: token for token, one in WORDS.get_added_tokens_decoder().items()}
END = SPECIAL["<|eos|>"]
ENDING = {END, SPECIAL["<|end|>"]}
GRAMMARS = Grammars(WORDS.to_str, WORDS.get_vocab_size(), [END])

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[A-Z][a-zé]{1,6}$"},
            "days": {"$ref": "#/$defs/few"},
            "of": {"type": "array", "items": {"enum": ["sun", "rain", None, True]}, "maxItems": 3},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 14}},
    },
)
HINT = Tool("hint", {"type": "object", "properties": {"loud": {"type": "boolean"}, "at": {"enum": ["a b", 7]}},
                     "additionalProperties": False})  # fmt: skip
LOOSE = Tool("loose", {"type": "object", "properties": {"any": True, "text": {"maxLength": 3}}, "required": ["any"]})
STOP = Tool("stop", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = {tool.name: tool for tool in (WEATHER, HINT, STOP)}
DIALECTS = [
    *((name, Dialect(special=SPECIAL)) for name in FORMATS),
    ("mistral", Dialect("[TOOL_CALLS]x[ARGS]", SPECIAL)),
    ("deepseek", Dialect(f"x{deepseek.SEPARATOR}y```json", SPECIAL)),
    ("hermes", Dialect()),
]


def spoken(matcher: Matcher, seed: int, longest: int = 1500) -> str:
    chance, outputs = Random(seed), list[int]()
    while len(outputs) < longest:
        allowed = matcher.mask(outputs).nonzero()[0].tolist()
        marks = [one for one in allowed if one in ENDING]
        token = chance.choice(marks if marks and chance.random() < 0.3 else allowed)
        if token == END:
            break
        outputs.append(token)
    text: str = WORDS.decode(outputs, skip_special_tokens=False)
    return text


def read(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    reader = MessageReader(FORMATS[name], TOOLS)
    said, calls = "", list[tuple[str, str]]()
    for part in reader.feed(text) + reader.end():
        match part:
            case Said(more):
                said += more
            case CallBegan(_, called):
                calls.append((called, ""))
            case ArgumentsGrew(_, more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return said, calls


@pytest.mark.parametrize(("name", "dialect"), DIALECTS)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_must_be_called_is(name: str, dialect: Dialect, parallel: bool) -> None:
    grammar = grammar_of(name, [*TOOLS.values()], dialect, must_call=True, parallel=parallel)
    called = set()
    for seed in range(6):
        text = spoken(Matcher(GRAMMARS, grammar), seed)
        said, calls = read(name, text)
        assert said == "", text
        assert calls
        assert parallel or len(calls) == 1
        for tool, arguments in calls:
            jsonschema.validate(json.loads(arguments), TOOLS[tool].parameters)
            called.add(tool)
    assert len(called) > 1


@pytest.mark.parametrize(("name", "dialect"), DIALECTS)
def test_a_named_one_is_called(name: str, dialect: Dialect) -> None:
    grammar = grammar_of(name, [HINT], dialect, must_call=True, parallel=False)
    said, calls = read(name, spoken(Matcher(GRAMMARS, grammar), 1))
    assert said == ""
    assert [called for called, _ in calls] == ["hint"]


@pytest.mark.parametrize(("name", "dialect"), DIALECTS)
def test_strict_tools_leave_a_model_its_text(name: str, dialect: Dialect) -> None:
    """Text, or calls of their schemas: what begins a call goes on as one."""
    weather = replace(WEATHER, strict=True)
    grammar = grammar_of(name, [weather], dialect, must_call=False, parallel=True)
    plain = "It rains in Paris."
    if name == "harmony":
        plain = harmony.ANSWERS + plain
    matcher = Matcher(GRAMMARS, grammar)
    assert matcher.mask(WORDS.encode(plain, add_special_tokens=False).ids)[END]
    text = spoken(Matcher(GRAMMARS, grammar_of(name, [WEATHER], dialect, must_call=True, parallel=False)), 2)
    if name in ("hermes", "deepseek", "mistral"):
        text = f"{plain}\n{text}"
        assert read(name, text)[0] == plain
    ids = WORDS.encode(text, add_special_tokens=False).ids
    assert Matcher(GRAMMARS, grammar).mask(ids)[END]


GRAMMARS_BEHIND = [
    Grammar(GrammarForm.JSON_SCHEMA, '{"enum": ["a", 7]}'),
    Grammar(GrammarForm.REGEX, "(a/b){2}"),
    Grammar(GrammarForm.CHOICE, '["yes", "nö"]'),
    Grammar(GrammarForm.LARK, 'start: word\nword: "sea" | "rain"'),
    grammar_of("hermes", [HINT], Dialect(), must_call=True, parallel=False),
]


@pytest.mark.parametrize("grammar", GRAMMARS_BEHIND, ids=lambda one: one.form)
@pytest.mark.parametrize("begun", [False, True])
def test_a_grammar_behind_reasoning(grammar: Grammar, begun: bool) -> None:
    answer = spoken(Matcher(GRAMMARS, grammar), 1)
    behind = after_thought(grammar, Dialect(), begun=begun)
    said = ("" if begun else "<think>\n") + f"It may be {answer}.\n</think>\n\n{answer}"
    ids = WORDS.encode(said, add_special_tokens=False).ids
    assert Matcher(GRAMMARS, behind).mask(ids)[END]
    with pytest.raises(InvalidRequest):
        Matcher(GRAMMARS, behind).mask([*ids, *WORDS.encode("!", add_special_tokens=False).ids])
    if not begun:
        assert Matcher(GRAMMARS, behind).mask(WORDS.encode(answer, add_special_tokens=False).ids)[END]


def test_properties_of_any_kind() -> None:
    """As a schema of true is, and one that says no type: neither is an object."""
    grammar = grammar_of("pythonic", [LOOSE], Dialect(), must_call=True, parallel=False)
    for said in ("[loose(any=7)]", '[loose(any="x", text=[])]', '[loose(any={"a": null}, text=false)]'):
        assert Matcher(GRAMMARS, grammar).mask(WORDS.encode(said, add_special_tokens=False).ids)[END]
