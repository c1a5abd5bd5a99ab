"""The description at /openapi.json: nothing is missing in it, and what it says of bodies is what readers do."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_build import sent
from prometheus_client import CollectorRegistry

from kvfleet.ingress.app import create_app
from kvfleet.ingress.fleet.openapi import OPERATIONS, openapi_document
from kvfleet.ingress.fleet.report import newest_report, placements_report
from kvfleet.ingress.requests.bodies import CHAT, COMPLETION, GENERATE, read_chat, read_completion, read_generate
from kvfleet.ingress.telemetry.metrics import IngressMetrics
from kvproto.errors import InvalidRequest
from kvproto.messages import Actual, Candidate, Decision
from kvservice.fields import BodyForm

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: list[tuple[BodyForm[Any], Any, dict[str, Any]]] = [
    (CHAT, read_chat, {"model": "m", "messages": MESSAGES}),
    (COMPLETION, read_completion, {"model": "m", "prompt": "x"}),
    (GENERATE, read_generate, {"prompt": "x"}),
]
WEIRD = st.one_of(
    st.none(), st.booleans(), st.integers(-200, 200), st.integers(), st.floats(-200, 200), st.text(max_size=3),
    st.sampled_from([[], {}, [1], [""], ["a"] * 17, "direct", "x" * 65, "x" * 2000, [[]], [[1]], {"5": 1}, {"x": 1},
                     {"5": 101.0}, {"type": "text"}, {"include_usage": 1}, "auto", "error", [{"role": "user"}],
                     [{"role": "assistant"}], [{"role": "user", "content": []}], [{"role": "user", "content": None}],
                     [{"role": "tool", "content": "x"}], [{"role": "user", "content": "x", "tool_calls": [1]}],
                     [{"role": "user", "content": [{"type": "image"}]}]]),
)  # fmt: skip


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    class Any_:  # handlers are not called
        def __getattr__(self, name: str) -> Any:
            return self

        metrics = IngressMetrics(CollectorRegistry())

    routes = {
        (re.sub(r":path", "", route.path), method.lower())  # type: ignore[attr-defined]
        for route in create_app(Any_()).routes  # type: ignore[attr-defined, arg-type]
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(one.path, one.method) for one in OPERATIONS}


def test_the_document_is_openapi_and_complete() -> None:
    document = openapi_document()
    assert document["openapi"] == "3.1.0"
    seen = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    components = document["components"]["schemas"]
    assert seen == set(components)
    for schema in components.values():
        jsonschema_rs.validator_for({**schema, "components": document["components"]})
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        operation = document["paths"][path]["post"]
        assert {one["name"] for one in operation["parameters"]} == {"Last-Event-ID", "Idempotency-Key"}
        assert "Retry-After" in operation["responses"]["429"]["headers"]
        properties = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert {"priority", "context_overflow", "top_k", "exact"} <= set(properties)


@pytest.mark.parametrize(("form", "read", "good"), BODIES)
@given(data=st.data())
def test_a_body_is_read_if_and_only_if_its_description_allows_it(
    form: BodyForm[Any], read: Any, good: dict[str, Any], data: st.DataObject
) -> None:
    """Field by field; what fields say of each other stands in no schema."""
    name = data.draw(st.sampled_from(sorted(form.schema["properties"])))
    value = data.draw(WEIRD)
    body = {**good, name: value}
    together = {"worker": ("policy", None), "top_logprobs": ("logprobs", True), "stream_options": ("stream", True)}
    together |= dict.fromkeys(("best_of", "length_penalty", "early_stopping"), ("use_beam_search", True))
    if name in together:
        other, its = together[name]
        body[other] = its
    if name == "max_tokens" and form is COMPLETION:
        body["echo"] = True
    if name == "policy" and value == "direct":
        body["worker"] = "w"
    allowed = jsonschema_rs.is_valid({**form.schema, "components": {"schemas": form.components}}, body)
    if allowed:
        read(body)
    else:
        with pytest.raises(InvalidRequest) as refused:
            read(body)
        assert str(refused.value.field).startswith(name)


def test_a_report_of_placements_has_its_described_form() -> None:
    candidate = Candidate("w0", 1.5, {"queue": 1.5}, {"device": 16})
    decisions = [
        Decision("r", 0, "t", "m", 1, "cost", "w0", "cheapest", 20, {"device": 16}, 0.25, (candidate,), 1, "p0", actual)
        for actual in (Actual(), Actual(True, {"device": 16}, 0.1, 0.2, 3, True, "cancelled"))
    ]
    components = openapi_document()["components"]
    for name, report in (
        ("PlacementsAnswer", placements_report("r", decisions)),
        ("NewestPlacementsAnswer", newest_report(decisions)),
    ):
        jsonschema_rs.validate({**components["schemas"][name], "components": components}, sent(report))
    assert [one["request_id"] for one in sent(newest_report(decisions))["placements"]] == ["r", "r"]
