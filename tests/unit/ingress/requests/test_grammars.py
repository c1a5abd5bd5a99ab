"""What a body says of its output's text, as workers are told."""

from __future__ import annotations

from typing import Any

import pytest

from kvfleet.ingress.requests.bodies import read_chat, read_completion, read_generate
from kvproto.messages import Grammar, GrammarForm

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
OF_SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("said", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarForm.JSON_OBJECT)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar(GrammarForm.JSON_SCHEMA, TEXT, OF_SCHEMA),
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, Grammar(GrammarForm.JSON_OBJECT)),
        ({"guided_json": SCHEMA}, Grammar(GrammarForm.JSON_SCHEMA, TEXT, "guided_json")),
        ({"guided_json": TEXT}, Grammar(GrammarForm.JSON_SCHEMA, TEXT, "guided_json")),
        ({"guided_regex": "[a-c]+"}, Grammar(GrammarForm.REGEX, "[a-c]+", "guided_regex")),
        ({"guided_choice": ["a", "ü"]}, Grammar(GrammarForm.CHOICE, '["a", "ü"]', "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, Grammar(GrammarForm.LARK, 'start: "a"', "guided_grammar")),
        (
            {"structured_outputs": {"json": SCHEMA}},
            Grammar(GrammarForm.JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            Grammar(GrammarForm.JSON_OBJECT, said="structured_outputs.json_object"),
        ),
    ],
)
def test_each_way_to_say_it(said: dict[str, Any], grammar: Grammar | None) -> None:
    chat = read_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **said})
    completion = read_completion({"model": "m", "prompt": "x", **said})
    turn = read_generate({"prompt": "x", **said})
    assert [one.sampling.grammar for one in (chat, completion, turn)] == [grammar] * 3
