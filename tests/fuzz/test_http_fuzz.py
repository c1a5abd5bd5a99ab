"""The ingress under requests that schemathesis makes of its own description: right ones, and wrong ones of every kind.

A real ingress before a real worker loop with the fake runner. The same seed every time, so a failure is one again.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvproto.buckets import ensure_buckets
from kvproto.connection import Connection
from kvproto.subjects import Subjects
from tests.integration.ingress.ingress_rig import serve
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

SEED = 20261122
FORM = [status_code_conformance, content_type_conformance, response_schema_conformance, response_headers_conformance]
GENERATING = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/v1/responses")
WITH_BODIES = (*GENERATING, "/sessions/{seq_id}/kv", "/v1/files", "/v1/batches")


@pytest.fixture(scope="module")
def base(nats_url: str) -> Iterator[str]:
    """An ingress and a fake worker on a loop of their own."""
    ready: queue.Queue[Any] = queue.Queue()

    async def run() -> None:
        subjects = Subjects(f"fuzz{uuid.uuid4().hex[:12]}")
        connection = await Connection.open(nats_url, name="fuzz", inbox_prefix="_adm.fuzz")
        await ensure_buckets(connection, subjects)
        fleet = FakeFleet(nats_url, subjects)
        await fleet.start("w1")
        served = await serve(nats_url, subjects)
        end = asyncio.Event()
        ready.put((served.url, asyncio.get_running_loop(), end))
        await end.wait()
        served.ingress.admission.check_integrity()
        served.ingress.runs.check_integrity()
        left = served.ingress.admission.running, served.client.streams, served.ingress.sessions.running
        await served.stop()
        await fleet.stop()
        await connection.close()
        assert left == (0, 0, 0), "something still runs"

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  it is the fixture's to raise
            ready.put(error)
        else:
            ready.put(None)

    thread = threading.Thread(target=work)
    thread.start()
    begun = ready.get(timeout=LIMIT_S)
    if isinstance(begun, BaseException):
        raise begun
    url, loop, end = begun
    yield url
    loop.call_soon_threadsafe(end.set)
    thread.join(LIMIT_S)
    if (error := ready.get(timeout=1)) is not None:
        raise error


def bounded(examples: int) -> Callable[[Any], Any]:
    def wrap(test: Any) -> Any:
        return seed(SEED)(
            settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(test)
        )

    return wrap


def make_possible(body: Any) -> None:
    """A model that is served, wherever it likes, and nothing to wait for: what is generated is beside the point."""
    if isinstance(body, dict):
        body["model"] = "demo"
        for name in ("policy", "worker", "model_name", "context_overflow"):
            body.pop(name, None)
        for name, most in (
            ("max_tokens", 3),
            ("max_completion_tokens", 3),
            ("max_output_tokens", 3),
            ("n", 3),
            ("min_tokens", 1),
        ):
            if type(body.get(name)) is int and body[name] > most:
                body[name] = most
        body.setdefault("max_output_tokens" if "input" in body else "max_tokens", 3)
        if body.get("max_tokens") == 0:
            body["echo"] = True
        if body.get("stream"):
            body.pop("prompt_logprobs", None)
        if isinstance(body.get("prompt"), list) and len(body["prompt"]) > 3:
            del body["prompt"][3:]


def judge(case: Any, response: Any, checks: list[Any]) -> None:
    what = f"{case.method} {case.formatted_path} {str(case.body)[:400]}: {response.status_code} {response.text[:400]}"
    assert response.status_code < 500 or response.status_code == 503, what
    if response.status_code in (429, 503) and "retry-after" not in {name.lower() for name in response.headers}:
        assert case.path in ("/livez", "/readyz", "/health"), what
    case.validate_response(response, checks=checks)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_route_keeps_to_its_description(base: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    right = mode is GenerationMode.POSITIVE
    for found in schema.get_all_operations():
        operation = found.ok()
        generating = operation.path in GENERATING
        if not right and operation.path not in WITH_BODIES:
            continue  # there is nothing that could be wrong
        checks = [*FORM, negative_data_rejection] if generating and not right else FORM
        statuses = hold(operation, mode, 40 if generating else 5, base, checks)
        assert not (right and generating) or statuses[200] > 5, (operation.path, statuses)


def hold(operation: Any, mode: GenerationMode, examples: int, base: str, checks: list[Any]) -> Counter[int]:
    """How often each status was the answer."""
    statuses: Counter[int] = Counter()

    @bounded(examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            make_possible(case.body)
        answer = case.call(base_url=base, timeout=LIMIT_S)
        statuses[answer.status_code] += 1
        judge(case, answer, checks)

    run()
    return statuses


def test_what_is_there_has_its_described_form(base: str) -> None:
    """What chance would not find: a session, and where it is."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    said = {"prompt": "Alas", "seq_id": "known/one", "max_tokens": 2, "logprobs": 1}
    known = {"path_parameters": {"seq_id": "known%2Fone"}}
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("/generate", "POST", {"body": said, "media_type": "application/json"}),
        ("/sessions/{seq_id}", "GET", known),
        ("/kv/route/{seq_id}", "GET", known),
        ("/sessions/{seq_id}", "DELETE", known),
    ]
    for path, method, asked in calls:
        case = schema[path][method].Case(**asked)
        answer = case.call(base_url=base, timeout=LIMIT_S)
        assert answer.status_code == 200, (path, answer.text)
        judge(case, answer, FORM)


def test_bodies_that_are_no_json_are_told_so(base: str) -> None:
    """Whatever bytes: 400 that names the body or a field."""
    good = json.dumps({"model": "demo", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})

    def cut(place: int, junk: bytes) -> bytes:
        raw = good.encode()
        return raw[: place % len(raw)] + junk

    with httpx.Client(base_url=base, trust_env=False) as http:

        @bounded(60)
        @given(
            st.sampled_from((*GENERATING, "/v1/batches")),
            st.binary(max_size=60) | st.builds(cut, st.integers(0, 200), st.binary(max_size=8)),
        )
        def run(path: str, body: bytes) -> None:
            answer = http.post(path, content=body)
            assert answer.status_code == 400, (path, body, answer.text)
            assert path == "/v1/messages" or answer.json()["error"]["param"], (path, body)

        run()
