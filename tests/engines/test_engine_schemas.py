"""Two hundred schemas, which a model that knows nothing never meets by itself."""

from __future__ import annotations

import json

import jsonschema
import pytest
from rigs import EngineRig, sampled

from kvproto.messages import FinishReason, Grammar, GrammarForm
from tests.support.json_schemas import schemas

AT_ONCE = 8
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
MOST = 950  # tokens


async def test_each_output_is_of_its_schema(rig: EngineRig, request: pytest.FixtureRequest) -> None:
    named = list(schemas().items())
    assert len(named) >= 200
    if "real vllm" in request.node.nodeid:  # the matcher is the same, and the server slow
        named = named[::10]
    for at in range(0, len(named), AT_ONCE):
        some = named[at : at + AT_ONCE]
        specs = []
        for name, schema in some:
            grammar = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(schema))
            await rig.engine.learn(grammar, "t")
            specs.append(rig.spec(name, rig.prompt(20), sampled(MOST, grammar=grammar)))
        for (name, schema), stream in zip(some, await rig.run_all(*specs), strict=True):
            assert stream.reason is FinishReason.STOP, (name, schema, stream.text)
            jsonschema.validate(json.loads(stream.text), schema, format_checker=FORMATS)
