"""POST /generate and the sessions behind it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from ingress_rig import Serve, Served, until
from scripted_worker import HELLO_IDS, ScriptedWorker, demo_bundle

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.sessions import session_blocks
from kvfleet.ingress.settings import SessionLimits
from kvproto import codec
from kvproto.messages import Accepted, AdminCommand, GenerateRequest, Sampling, SessionHead, Turn
from kvproto.subjects import Subjects
from tests.support import sse


def events_of(body: str) -> list[dict[str, Any]]:
    """The data lines of a stream; anything else but ids, blank lines and comments is a fault."""
    lines = [line for line in body.split("\n") if line and not line.startswith((":", "id: "))]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def turn(served: Served, prompt: str, **body: Any) -> list[dict[str, Any]]:
    answer = await served.http.post("/generate", json={"prompt": prompt, **body})
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


async def test_the_events_of_one_turn(served: Served, worker: ScriptedWorker) -> None:
    start, *tokens, done = await turn(served, "Once", seq_id="s")
    assert start == {
        "type": "start",
        "seq_id": "s",
        "prompt": "Once",
        "cached_tokens": 0,
        "worker_id": "w1",
        "request_id": start["request_id"],
    }
    assert tokens == [
        {"type": "token", "token": "He", "token_id": 550},
        {"type": "token", "token": "l", "token_id": 81},
        {"type": "token", "token": "lo", "token_id": 951},
        {"type": "token", "token": "!", "token_id": 6},
    ]
    assert done["type"] == "done"
    assert done["generated_text"] == "OnceHello!"
    assert done["tokens_generated"] == 4
    assert done["finish_reason"] == "stop"
    assert done["usage"]["completion_tokens"] == 4
    sampling = worker.requests[0][1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (50, 1.0, 1.0, 0)


async def test_a_session_continues_with_its_tokens_cached(served: Served, worker: ScriptedWorker) -> None:
    seq_id = (await turn(served, "To be"))[0]["seq_id"]
    start, *_ = await turn(served, " or not", seq_id=seq_id)
    (_, first), (_, second) = worker.requests
    assert second.prompt_ids[: len(first.prompt_ids) + 4] == first.prompt_ids + HELLO_IDS
    assert start["cached_tokens"] == len(first.prompt_ids) + 4
    assert (first.prompt_ids + second.prompt_ids).count(0) == 2  # BOS once in each: the second begins with the first
    assert first.session == second.session

    about = (await served.http.get(f"/sessions/{seq_id}")).json()
    assert about["tokens"] == len(second.prompt_ids) + 4
    assert about["cached_tokens"] == about["tokens"]
    assert about["workers"] == {"w1": {"device": about["tokens"], "host": about["tokens"] + 16}}
    assert about["turns"] == 2
    assert (about["worker_id"], about["address"]) == ("w1", f"{worker.subjects.namespace}.worker.w1.generate.public")
    route = (await served.http.get(f"/kv/route/{seq_id}")).json()
    assert route == {name: about[name] for name in ("worker_id", "address", "region")}
    kv = await served.http.get(f"/sessions/{seq_id}/kv?layer=3")
    assert kv.content == b"safetensors of layer 3 of %d tokens" % about["tokens"]


async def test_a_worker_takes_requests_at_the_address_that_is_told(served: Served, worker: ScriptedWorker) -> None:
    listed = (await served.http.get("/workers")).json()["w1"]["address"]
    route = (await served.http.get("/kv/route/any")).json()
    connection = served.client.connection
    for number, address in enumerate((listed, route["address"])):
        request = GenerateRequest(
            f"r{number}", 0, "demo", Sampling(max_tokens=2), f"{connection.inbox_prefix}.r{number}", (5, 6)
        )
        accepted = await connection.request(address, codec.encode(request), timeout_s=5.0)
        (frame,) = codec.decode_frames(accepted.data)
        assert isinstance(frame, Accepted)
        assert frame.worker == "w1"
    assert [tenant for tenant, _ in worker.requests] == ["public", "public"]


async def test_a_second_turn_at_the_same_time_is_refused(served: Served, worker: ScriptedWorker) -> None:
    worker.held.clear()
    first = asyncio.create_task(turn(served, "One", seq_id="busy"))
    await until(lambda: worker.requests)
    refused = await served.http.post("/generate", json={"prompt": "Two", "seq_id": "busy"})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "session_busy"
    assert (await served.http.delete("/sessions/busy")).status_code == 409
    chat = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "seq_id": "busy"}
    forked = asyncio.create_task(served.http.post("/v1/chat/completions", json=chat))
    await until(lambda: len(worker.requests) >= 2)
    worker.held.set()
    assert (await first)[-1]["type"] == "done"
    assert (await forked).status_code == 200  # a chat only takes ids from a session, it never fails on one
    assert (await served.http.get("/sessions/busy")).json()["turns"] == 1


async def test_a_failed_turn_leaves_the_session_as_it_was(served: Served, worker: ScriptedWorker) -> None:
    await turn(served, "One", seq_id="s")
    before = (await served.http.get("/sessions/s")).json()
    worker.failure, worker.fails_after = ("invalid_request", "no more", False), 1
    *_, last = await turn(served, "Two", seq_id="s")
    assert last == {"type": "error", "error": "no more", "code": "invalid_request"}
    assert (await served.http.get("/sessions/s")).json() == before
    *_, last = await turn(served, "Two", seq_id="new")
    assert last["type"] == "error"
    assert (await served.http.get("/sessions/new")).status_code == 404


async def test_a_client_that_leaves_cancels_its_turn(served: Served, worker: ScriptedWorker) -> None:
    await turn(served, "One", seq_id="s")
    before = (await served.http.get("/sessions/s")).json()
    worker.reply, worker.token_s = [(50, "a")] * 1000, 0.01
    async with served.http.stream(
        "POST", "/generate", json={"prompt": "Two", "seq_id": "s", "max_tokens": 400}
    ) as answer:
        async for line in sse.alines(answer):
            if "token_id" in line:
                break
    await until(lambda: worker.cancels and not served.ingress.admission.running)
    assert worker.cancels[0].request == worker.requests[1][1].request
    assert (await served.http.get("/sessions/s")).json() == before
    assert not served.client.streams
    assert not worker.running
    metrics = (await served.http.get("/metrics")).text
    assert 'kvfleet_ingress_requests_total{code="499",route="generate"} 1.0' in metrics


async def test_whole_answers_are_cancelled_too(served: Served, worker: ScriptedWorker) -> None:
    worker.held.clear()
    body = {"model": "demo", "prompt": "x"}
    async with httpx.AsyncClient(base_url=served.url) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: worker.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: worker.cancels)
    assert worker.cancels


async def test_sessions_are_deleted(served: Served) -> None:
    await turn(served, "One", seq_id="a/b c")
    for path in ("/sessions/x", "/sessions/x%2Fkv"):
        await served.http.post("/generate", json={"prompt": "x", "seq_id": path[10:].replace("%2F", "/")})
        assert (await served.http.get(path)).json()["seq_id"] == path[10:].replace("%2F", "/")
    assert (await served.http.delete("/sessions/x/kv")).status_code == 405
    assert (await served.http.get("/sessions/x%2Fkv/kv")).headers["content-type"] == "application/octet-stream"
    assert (await served.http.delete("/sessions/x%2Fkv")).json() == {"seq_id": "x/kv", "deleted": True}
    assert (await served.http.get("/sessions/x")).status_code == 200
    assert (await served.http.delete("/sessions/a%2Fb%20c")).json() == {"seq_id": "a/b c", "deleted": True}
    assert (await served.http.get("/sessions/a%2Fb%20c")).status_code == 404
    assert (await served.http.delete("/sessions/a%2Fb%20c")).status_code == 404
    assert (await turn(served, "One", seq_id="a/b c"))[0]["cached_tokens"] == 0, "its blocks went with it"


async def test_a_worker_that_does_not_answer_keeps_no_session(
    served: Served, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ERASE_TIMEOUT_S", "FIND_TIMEOUT_S"):
        monkeypatch.setattr(session_blocks, name, 0.1)
    await turn(served, "One", seq_id="s")
    worker.answers_admin = False
    about = (await served.http.get("/sessions/s")).json()
    assert (about["worker_id"], about["cached_tokens"], about["blocks"], about["workers"]) == (None, 0, [], {})
    assert (await served.http.delete("/sessions/s")).json() == {"seq_id": "s", "deleted": True}
    assert worker.admin[-1].command is AdminCommand.ERASE
    assert (await served.http.get("/sessions/s")).status_code == 404


async def test_only_workers_of_its_model_are_asked_about_a_session(
    served: Served, nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker
) -> None:
    others = [
        await ScriptedWorker.start(nats_url, fleet_buckets, "w2", demo_bundle("other")),
        await ScriptedWorker.start(nats_url, fleet_buckets, "w3"),
    ]
    try:
        await until(lambda: len(list(served.client.members.view.ready())) == 3)
        await turn(served, "One", seq_id="s", model_name="demo")
        assert sorted((await served.http.get("/sessions/s")).json()["workers"]) == ["w1", "w3"]
        assert (await served.http.delete("/sessions/s")).status_code == 200
        other, same = ({one.command for one in each.admin} for each in others)
        assert AdminCommand.ERASE in same
        assert not {AdminCommand.ERASE, AdminCommand.INSPECT} & other
    finally:
        await asyncio.gather(*(one.stop() for one in others))


async def test_idle_sessions_expire(serving: Serve) -> None:
    limits = SessionLimits(idle_expiry_s=0.3, sweep_period_s=0.1)
    served = await serving(sessions=limits)
    await turn(served, "One", seq_id="s")
    assert (await served.http.get("/sessions/s")).status_code == 200
    await until(lambda: served.ingress.session_index.table.total == 0)
    assert served.ingress.session_index.table.total == 0
    assert (await served.http.get("/sessions/s")).status_code == 404


async def test_a_tenant_has_at_most_its_number_of_sessions(serving: Serve) -> None:
    served = await serving(sessions=SessionLimits(per_tenant=2))
    for seq_id in ("a", "b"):
        await turn(served, "One", seq_id=seq_id)
    await until(lambda: served.ingress.session_index.table.total >= 2)
    refused = await served.http.post("/generate", json={"prompt": "One", "seq_id": "c"})
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "60"
    await turn(served, "again", seq_id="a")
    await served.http.delete("/sessions/b")
    await until(lambda: served.ingress.session_index.table.total <= 1)
    unnamed = (await turn(served, "One"))[0]["seq_id"]
    await until(lambda: served.ingress.session_index.table.total >= 2)
    await turn(served, "One", seq_id="c")  # what nobody named gives way
    assert (await served.http.get(f"/sessions/{unnamed}")).status_code == 404


async def test_a_session_keeps_to_its_model_and_moves_between_ingresses(
    serving: Serve, nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker
) -> None:
    one, two = await serving(), await serving()
    other = await ScriptedWorker.start(nats_url, fleet_buckets, "w2", demo_bundle("other"))
    try:
        views = [served.client.members.view for served in (one, two)]
        await until(lambda: all(len(view.models()) == 2 for view in views))
        await turn(one, "Once", seq_id="s", model_name="demo")
        await turn(two, " upon", seq_id="s")
        assert worker.requests[1][1].prompt_ids[: len(worker.sequences[0])] == worker.sequences[0]
        refused = await one.http.post("/generate", json={"prompt": "x", "seq_id": "s", "model_name": "other"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "model_name"
        assert "'demo'" in refused.json()["error"]["message"]
        unclear = await one.http.post("/generate", json={"prompt": "x"})
        assert unclear.status_code == 400
        assert "demo, other" in unclear.json()["error"]["message"]
    finally:
        await other.stop()


async def test_a_turn_that_cannot_be_committed_is_not_done(served: Served, worker: ScriptedWorker) -> None:
    worker.token_s = 0.02
    running = asyncio.create_task(turn(served, "One", seq_id="s"))
    await until(lambda: served.ingress.metrics.tally.generated_tokens_total)
    key = worker.requests[0][1].session
    assert key is not None
    bucket = served.ingress.sessions.bucket
    entry = await bucket.get(key)
    assert entry.value is not None
    head = codec.decode(SessionHead, entry.value)  # as if its lease had run out and somebody else had come
    taken = replace(head, turn=Turn("another", "elsewhere", head.updated_unix_ms))
    await bucket.update(key, codec.encode(taken), entry.revision)
    *_, last = await running
    assert (last["type"], last["code"]) == ("error", "session_busy")
    assert (await bucket.get(key)).value == codec.encode(taken)


async def test_turns_may_follow_at_once(serving: Serve) -> None:
    """When the end of a turn has arrived, its session and its key's limit are free again."""
    served = await serving(keys=f'[[keys]]\nsha256 = "{hash_key("k")}"\nmax_concurrent = 1\n')
    served.http.headers["x-api-key"] = "k"
    chat = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    for n in range(15):
        assert (await turn(served, "again", seq_id="s"))[-1]["type"] == "done"
        answer = await served.http.post("/v1/chat/completions", json={**chat, "stream": n % 2 == 0})
        assert answer.status_code == 200
