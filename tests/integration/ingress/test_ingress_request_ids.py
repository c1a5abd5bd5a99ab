"""Ids that callers give their requests, and what OPTIONS tells."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from ingress_rig import Serve, Served, start_placement
from scripted_worker import ScriptedWorker

from kvfleet.ingress.app import create_app
from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.settings import WebRules
from kvfleet.ingress.telemetry.audit import Audit
from kvproto.subjects import Subjects

BODY = {"model": "demo", "prompt": "x", "max_tokens": 2}
OWN = re.compile(r"[a-z2-7]{26}")
PAGE = "https://chat.example"


async def ask(served: Served, said: str | None = None, **changes: Any) -> Any:
    headers = {} if said is None else {"x-request-id": said}
    return await served.http.post("/v1/completions", json={**BODY, **changes}, headers=headers)


# ---------------------------------------------------------------------------------------------- ids of callers


@pytest.mark.parametrize(
    "said", ["7", "req_abc-1.2", "7c9e6679-7425-40de-944b-e07fc1f90ae7", "Root=1-6789:x/y+z@a~", "x" * 128]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_callers_id_is_told_back(served: Served, worker: ScriptedWorker, said: str, stream: bool) -> None:
    answer = await ask(served, said, stream=stream)
    assert answer.headers["x-request-id"] == said
    own = answer.headers["x-kvfleet-request-id"]
    assert OWN.fullmatch(own)
    assert worker.requests[-1][1].request == own, "it is no id of ours"
    if not stream:
        assert answer.json()["kvfleet"]["request_id"] == own


@pytest.mark.parametrize("said", ["", "x" * 129, "a b", 'a"b', "a\tb", "a;b", "<script>", "a%0ab", "\u00e4"])
async def test_one_that_might_do_harm_is_not(served: Served, worker: ScriptedWorker, said: str) -> None:
    answer = await served.http.post("/v1/completions", json=BODY, headers=[(b"x-request-id", said.encode("latin-1"))])
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == answer.headers["x-kvfleet-request-id"]


async def test_every_answer_tells_it(served: Served, worker: ScriptedWorker) -> None:
    for method, path in (("GET", "/livez"), ("GET", "/nowhere"), ("POST", "/livez"), ("OPTIONS", "/v1/completions")):
        answer = await served.http.request(method, path, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
    refused = await ask(served, "mine", max_tokens=-1)
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine")


async def test_it_names_nothing(served: Served, worker: ScriptedWorker) -> None:
    """Two requests of one id are two, and ours does not begin another's."""
    first, second = await ask(served, "same"), await ask(served, "same")
    assert first.headers["x-kvfleet-request-id"] != second.headers["x-kvfleet-request-id"]
    own = first.headers["x-kvfleet-request-id"]
    assert (await ask(served, own)).headers["x-kvfleet-request-id"] != own
    assert len(worker.requests) == 3


async def test_placements_are_found_by_ours(
    serving: Serve, worker: ScriptedWorker, nats_url: str, fleet_buckets: Subjects
) -> None:
    placement, connection = await start_placement(nats_url, fleet_buckets, "p0")
    served = await serving()
    answer = await ask(served, "mine")
    found = await served.http.get("/v1/placements/" + answer.headers["x-kvfleet-request-id"])
    assert found.json()["request_id"] == answer.json()["kvfleet"]["request_id"]
    assert (await served.http.get("/v1/placements/mine")).status_code in (400, 404)
    await placement.stop()
    await connection.close()


async def test_audit_and_log_have_both(
    serving: Serve, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[bytes] = []
    keys = json.dumps({"keys": [{"name": "k", "sha256": hash_key("k")}]})
    served = await serving(audit=Audit(lines.append, lambda: 0.0), keys=keys)
    with caplog.at_level(logging.DEBUG, "kvfleet.ingress.request_flow"):
        headers = {"x-request-id": "mine", "x-api-key": "k"}
        answer = await served.http.post("/v1/completions", json=BODY, headers=headers)
    own = answer.headers["x-kvfleet-request-id"]
    begin, end = map(json.loads, lines[-2:])
    assert [(one["request"], one["callers_id"]) for one in (begin, end)] == [(own, "mine")] * 2
    noted = [vars(record) for record in caplog.records]
    assert ("mine", own) in {(one.get("callers_id"), one.get("request")) for one in noted}
    lines.clear()
    await served.http.post("/v1/completions", json=BODY, headers={"x-api-key": "k"})
    assert all(b"callers_id" not in line for line in lines)


# ---------------------------------------------------------------------------------------------- OPTIONS


async def test_options_of_every_route_tell_what_it_takes(served: Served, worker: ScriptedWorker) -> None:
    taken: dict[str, set[str]] = {}
    for route in create_app(served.ingress).routes:  # type: ignore[attr-defined]
        taken.setdefault(re.sub(r"\{[^}]*\}", "a.js", route.path), {"OPTIONS"}).update(route.methods)
    assert taken["/sessions/a.js"] == {"GET", "HEAD", "DELETE", "OPTIONS"}
    for path, methods in taken.items():
        answer = await served.http.options(path)
        assert (answer.status_code, answer.content) == (204, b""), path
        assert set(answer.headers["allow"].split(", ")) == methods, path
        refused = await served.http.request("PATCH", path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
        assert refused.headers["allow"] == answer.headers["allow"]
    assert (await served.http.options("/nowhere")).status_code == 404


async def test_without_cors_origins_no_page_may(served: Served, worker: ScriptedWorker) -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    answer = await served.http.options("/v1/chat/completions", headers=asks)
    assert answer.status_code == 204
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_with_cors_origins_every_route_answers_a_preflight(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(web=WebRules(cors_origins=(PAGE,)))
    for route in create_app(served.ingress).routes:  # type: ignore[attr-defined]
        path = re.sub(r"\{[^}]*\}", "a.js", route.path)
        for method in route.methods - {"HEAD"}:
            asks = {"origin": PAGE, "access-control-request-method": method,
                    "access-control-request-headers": "authorization, x-request-id, idempotency-key"}  # fmt: skip
            answer = await served.http.options(path, headers=asks)
            assert answer.status_code == 200, (path, answer.text)
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert method in answer.headers["access-control-allow-methods"]
            assert "x-request-id" in answer.headers["access-control-allow-headers"]
        plain = await served.http.options(path)
        assert (plain.status_code, "allow" in plain.headers) == (204, True)
    told = (await ask(served)).headers
    exposed = (await served.http.get("/livez", headers={"origin": PAGE})).headers["access-control-expose-headers"]
    assert {"x-request-id", "x-kvfleet-request-id"} <= set(exposed.split(", ")) & set(told)
