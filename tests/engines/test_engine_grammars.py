"""An output follows its grammar to the end, whatever else is asked of it, also where it goes on elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from rigs import EngineRig, Stream, greedy, key_of, sampled

from kvproto.errors import InvalidRequest
from kvproto.messages import FinishReason, Grammar, GrammarForm, Sampling

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zé]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "of": {"type": "array", "items": {"enum": ["sea", "rain"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "of"],
    "additionalProperties": False,
}
PERSON = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA))
MOST = 400  # tokens; a model that knows nothing puts blanks wherever it may


def check_person(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


async def follow(rig: EngineRig, sampling: Sampling, grammar: Grammar = PERSON, request: str = "r") -> Stream:
    await rig.engine.learn(grammar, "t")
    stream = await rig.run(rig.spec(request, rig.prompt(30), replace(sampling, grammar=grammar)))
    assert stream.reason is FinishReason.STOP, stream.text
    return stream


@pytest.mark.parametrize("sampling", [greedy(MOST), sampled(MOST)], ids=["greedy", "sampled"])
async def test_json_is_of_its_schema(rig: EngineRig, sampling: Sampling) -> None:
    check_person((await follow(rig, sampling)).text)


@pytest.mark.parametrize(
    ("form", "text", "pattern"),
    [
        (GrammarForm.REGEX, "[a-c]{3}-[0-9]{2,4}", "[a-c]{3}-[0-9]{2,4}"),
        (GrammarForm.CHOICE, '["yes", "no", "über"]', "yes|no|über"),
        (GrammarForm.LARK, 'start: "<" word ">"\nword: /[a-z]{1,5}/', "<[a-z]{1,5}>"),
    ],
)
async def test_text_is_of_its_grammar(rig: EngineRig, form: GrammarForm, text: str, pattern: str) -> None:
    assert re.fullmatch(pattern, (await follow(rig, sampled(MOST), Grammar(form, text))).text)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": MOST},  # its end comes first
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"logprobs": 3},
        {"stop": ("never to be seen",)},
        {"top_k": 1, "min_p": 0.5, "top_p": 0.1},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_beside_all_else_that_is_asked(rig: EngineRig, fields: dict[str, Any]) -> None:
    stream = await follow(rig, sampled(MOST, **fields))
    check_person(stream.text)
    assert len(stream.logprobs) == (len(stream.ids) if "logprobs" in fields else 0)


async def test_each_choice_follows_it_by_itself(rig: EngineRig) -> None:
    await rig.engine.learn(PERSON, "t")
    spec = rig.spec("r", rig.prompt(30), sampled(MOST, n=3, grammar=PERSON))
    streams = await rig.run_all(*(replace(spec, choice=choice) for choice in range(3)))
    for stream in streams:
        check_person(stream.text)
    assert len({stream.text for stream in streams}) > 1


async def test_others_beside_are_as_if_alone(rig: EngineRig) -> None:
    plain = rig.spec("alone", rig.prompt(30), sampled(20))
    alone = await rig.run(plain)
    bound = rig.spec("bound", rig.prompt(40, 1), sampled(MOST, grammar=PERSON))
    await rig.engine.learn(PERSON, "t")
    beside, of_grammar = await rig.run_all(replace(plain, request="beside"), bound)
    assert beside.result == alone.result
    check_person(of_grammar.text)


async def test_every_cut_continues_as_if_it_had_not_moved(rig: EngineRig) -> None:
    uncut = await follow(rig, sampled(MOST, presence_penalty=0.5))
    spec = rig.submitted[("r", 0, 0)]
    cuts = range(1, len(uncut.ids), max(len(uncut.ids) // 8, 1))
    after = [
        replace(spec, request=f"after {cut}", output_ids=uncut.ids[:cut], text_sent=len("".join(uncut.pieces[:cut])))
        for cut in cuts
    ]
    for cut, stream in zip(cuts, await rig.run_all(*after), strict=True):
        assert stream.ids == uncut.ids[cut:]
        assert "".join(uncut.pieces[:cut]) + stream.text == uncut.text


async def test_a_pause_changes_nothing(rig: EngineRig) -> None:
    uncut = await follow(rig, sampled(MOST))
    spec = replace(rig.submitted[("r", 0, 0)], request="paused")
    rig.submit(spec)
    await rig.until_tokens(spec, 3)
    rig.engine.pause("paused", 0)
    rig.engine.resume("paused", 0)
    await rig.until(key_of(spec))
    assert rig.stream(key_of(spec)).result == uncut.result


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        (GrammarForm.JSON_SCHEMA, '{"type": "nothing"}', "nothing"),
        (GrammarForm.JSON_SCHEMA, "{", "no JSON"),
        (GrammarForm.JSON_SCHEMA, "[]", "must be an object"),
        (GrammarForm.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "nowhere"),
        (GrammarForm.REGEX, "(", "cannot be compiled"),
        (GrammarForm.CHOICE, '["a", 1]', "choices must be"),
        (GrammarForm.LARK, "start: nowhere", "nowhere"),
    ],
)
async def test_what_is_no_grammar_is_refused_by_what_is_wrong(
    rig: EngineRig, form: GrammarForm, text: str, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        await rig.engine.learn(Grammar(form, text, "guided_json"), "t")
    assert refused.value.field == "guided_json"


async def test_what_explodes_is_refused_and_stops_nobody(rig: EngineRig) -> None:
    plain = rig.spec("r", rig.prompt(30), sampled(20))
    rig.submit(plain)
    with pytest.raises(InvalidRequest, match="takes more than"):
        await rig.engine.learn(Grammar(GrammarForm.JSON_SCHEMA, '{"type": "integer", "multipleOf": 1234567}'), "t")
    await rig.until(key_of(plain))
    check_person((await follow(rig, greedy(MOST), request="next")).text)
