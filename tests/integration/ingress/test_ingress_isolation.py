"""What a tenant can do with another's work, at HTTP: nothing, and it cannot tell whether there is any.

Every answer to the stranger is compared with the answer to the same question about what does not exist. The stranger is
an admin: admins are of their own tenant too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from cut_streams import read, texts
from ingress_rig import FLEET_KEY, Serve, Served, start_placement, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvproto.ids import new_request_id
from kvproto.subjects import Subjects

CHAT, GENERATE = "/v1/chat/completions", "/generate"
KEYS = json.dumps(
    [
        {"name": "owner", "sha256": hash_key("owner"), "tenant": "alice"},
        {"name": "stranger", "sha256": hash_key("stranger"), "tenant": "bob", "admin": True},
        {"name": "plain", "sha256": hash_key("plain"), "tenant": "carol"},
    ]
)
OWNER = {"x-api-key": "owner"}
STRANGERS = [{"x-api-key": "stranger"}, {"x-api-key": "plain"}]
LONG = [(50 + n, f" word{n}") for n in range(60)]
SECRET = "the owner's own words"
BODY = {"prompt": SECRET, "seq_id": "mine", "max_tokens": 60}


@pytest.fixture
async def served(serving: Serve, worker: ScriptedWorker) -> Served:
    return await serving(keys=KEYS, fleet_key=FLEET_KEY.encode())


def shape(answer: httpx.Response, *names: str) -> tuple[Any, ...]:
    """All of an answer but what is of this one request, and what the question itself named."""
    text = answer.text
    for name in names:
        text = text.replace(name, "NAME")
    headers = {name for name in answer.headers if name != "content-length"}
    return answer.status_code, text, headers


async def test_sessions(served: Served, worker: ScriptedWorker) -> None:
    """They are not found, deleted, read, or routed to; and one of the same name is another's own."""
    assert (await served.http.post(GENERATE, json=BODY, headers=OWNER)).status_code == 200
    before = (await served.http.get("/sessions/mine", headers=OWNER)).json()
    asked = len(worker.admin)
    for stranger in STRANGERS:
        for method, path in (("GET", "/sessions/{}"), ("DELETE", "/sessions/{}"), ("GET", "/sessions/{}/kv?layer=0"),
                             ("GET", "/kv/route/{}")):  # fmt: skip
            theirs = await served.http.request(method, path.format("mine"), headers=stranger)
            nobodys = await served.http.request(method, path.format("none"), headers=stranger)
            assert shape(theirs, "mine") == shape(nobodys, "none"), (method, path)
            assert theirs.status_code in (404, 403) or path == "/kv/route/{}"
            assert SECRET not in theirs.text
    assert len(worker.admin) == asked, "nothing was asked of a worker"
    worker.requests.clear()
    answer = await served.http.post(GENERATE, json={"prompt": "x", "seq_id": "mine"}, headers=STRANGERS[0])
    assert answer.status_code == 200
    _, request = worker.requests[0]
    alone = (await served.ingress.sessions.read("bob", "mine")).ids[: len(request.prompt_ids)]
    assert tuple(request.prompt_ids) == alone, "begins anew: no word of the owner's history"
    assert (await served.http.delete("/sessions/mine", headers=STRANGERS[0])).status_code == 200
    after = (await served.http.get("/sessions/mine", headers=OWNER)).json()
    assert (after["tokens"], after["turns"]) == (before["tokens"], 1), "the owner's is as it was"


async def test_a_busy_session_is_not_busy_for_a_stranger(served: Served, worker: ScriptedWorker) -> None:
    worker.reply, worker.token_s = LONG, 0.01
    running = asyncio.create_task(served.http.post(GENERATE, json=BODY, headers=OWNER))
    await until(lambda: worker.generated > 3)
    assert (await served.http.post(GENERATE, json=BODY, headers=OWNER)).status_code == 409
    for stranger in STRANGERS:
        answer = await served.http.post(GENERATE, json={**BODY, "max_tokens": 1}, headers=stranger)
        assert answer.status_code == 200
        theirs = await served.http.delete("/sessions/other", headers=stranger)
        assert theirs.status_code == 404
    assert "word59" in (await running).text


@pytest.mark.parametrize("state", ["running", "parked", "finished"])
async def test_streams_are_not_resumed_repeated_or_cancelled(
    served: Served, worker: ScriptedWorker, state: str
) -> None:
    worker.reply, worker.token_s = LONG, 0.01
    keyed = {**OWNER, "idempotency-key": "order-1"}
    running: asyncio.Task[httpx.Response] | None = None
    if state == "running":
        running = asyncio.create_task(served.http.post(GENERATE, json=BODY, headers=keyed))
        await until(lambda: worker.generated > 5)
        (_, begun), *_ = worker.requests
        last = f"{begun.request}.aaaaaaaa:3"
    else:
        events = 5 if state == "parked" else None
        before = await read(served, GENERATE, BODY, events=events, x_api_key="owner", idempotency_key="order-1")
        last = before[-1].id
    request = last.partition(".")[0]
    said = len(worker.requests)
    for stranger in STRANGERS:
        nobodys = last.replace(request, new_request_id())
        answers = [
            await served.http.post(GENERATE, json=BODY, headers={**stranger, "last-event-id": one})
            for one in (last, nobodys)
        ]
        mine = [shape(answer, SECRET) for answer in answers]
        if mine[0][0] != 200:
            assert mine[0] == mine[1]
        assert all(request not in answer.text and answer.headers["x-request-id"] != request for answer in answers)
        # the same key of another tenant is another request, not a mismatch
        worker.token_s = 0.0
        other = await served.http.post(
            GENERATE, json={"prompt": "x", "max_tokens": 2}, headers={**stranger, "idempotency-key": "order-1"}
        )
        assert (other.status_code, other.headers["x-request-id"] == request) == (200, False)
    assert not [cancel for cancel in worker.cancels if cancel.request == request and state != "parked"]
    assert len([1 for _, one in worker.requests[said:] if one.request == request]) == 0
    if running is not None:
        assert "word59" in (await running).text
    else:
        after = await read(served, GENERATE, BODY, x_api_key="owner", idempotency_key="order-1")
        assert texts(after) == {0: "".join(text for _, text in LONG)}
    served.ingress.runs.check_integrity()


@pytest.fixture
async def placed(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[None]:
    loop, connection = await start_placement(nats_url, fleet_buckets, "p1")
    yield
    await loop.stop()
    await connection.close()


async def test_placements_are_not_explained(
    nats_url: str, placed: None, serving: Serve, worker: ScriptedWorker
) -> None:
    served = await serving(keys=KEYS, fleet_key=FLEET_KEY.encode())
    answer = await served.http.post(GENERATE, json=BODY, headers=OWNER)
    request = answer.headers["x-request-id"]
    own = await served.http.get(f"/v1/placements/{request}", headers=OWNER)
    nothing = new_request_id()
    plain = {"x-api-key": "plain"}
    theirs = await served.http.get(f"/v1/placements/{request}", headers=plain)
    nobodys = await served.http.get(f"/v1/placements/{nothing}", headers=plain)
    assert own.status_code == 200
    assert theirs.status_code == 404
    assert shape(theirs, request) == shape(nobodys, nothing)


async def test_placements_are_listed_to_their_own_tenant_alone(
    nats_url: str, placed: None, serving: Serve, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every spelling of the question, with the words of the wire among them."""
    monkeypatch.setattr("kvfleet.ingress.fleet.listings.KEPT_S", 0.0)
    served = await serving(keys=KEYS, fleet_key=FLEET_KEY.encode())
    request = (await served.http.post(GENERATE, json=BODY, headers=OWNER)).headers["x-request-id"]
    own = (await served.http.get("/v1/placements", headers=OWNER)).json()["placements"]
    assert [(one["request_id"], one["tenant"]) for one in own] == [(request, "alice")]
    assert SECRET not in json.dumps(own)
    plain = {"x-api-key": "plain"}
    for query in ("", "?limit=200", "?tenant=alice", "?tenant=", "?model=demo", "?limit=1&tenant=*&model=demo"):
        theirs = await served.http.get(f"/v1/placements{query}", headers=plain)
        assert (theirs.status_code, theirs.json()) == (200, {"placements": []}), query


async def test_nothing_is_listed(served: Served, worker: ScriptedWorker) -> None:
    """There is no list of sessions, and of requests none of others; what counts for all is an admin's, and names
    nobody's."""
    assert (await served.http.post(GENERATE, json=BODY, headers=OWNER)).status_code == 200
    plain = {"x-api-key": "plain"}
    for path in ("/sessions", "/sessions/", "/v1/placements/", "/stats", "/workers", "/metrics"):
        assert (await served.http.get(path, headers=plain)).status_code in (400, 403, 404), path
    for path in ("/stats", "/workers", "/metrics", "/health", "/v1/models"):
        text = (await served.http.get(path, headers=STRANGERS[0])).text
        assert SECRET not in text
        assert "mine" not in text
        assert "alice" not in text


async def test_a_conversation_is_not_known_to_others(served: Served, worker: ScriptedWorker) -> None:
    """The ids of a finished chat are spliced into its own tenant's next turn alone."""
    ask = [{"role": "user", "content": SECRET}]
    first = await served.http.post(CHAT, json={"model": "demo", "messages": ask}, headers=OWNER)
    said = first.json()["choices"][0]["message"]
    again = {"model": "demo", "messages": [*ask, said, {"role": "user", "content": "go on"}]}
    hits = served.ingress.splices.hits_total
    for stranger in STRANGERS:
        assert (await served.http.post(CHAT, json=again, headers=stranger)).status_code == 200
    assert served.ingress.splices.hits_total == hits
    assert (await served.http.post(CHAT, json=again, headers=OWNER)).status_code == 200
    assert served.ingress.splices.hits_total == hits + 1
