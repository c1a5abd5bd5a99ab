"""The audit log of an ingress: what has a line, and what such a line does not have."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from cut_streams import read
from ingress_rig import Serve, Served, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.telemetry.audit import REFUSED_PER_ADDRESS, Audit
from kvproto.ids import session_key

GENERATE, COMPLETION = "/generate", "/v1/completions"
KEYS = json.dumps(
    [
        {"name": "team-a", "sha256": hash_key("sk-a"), "tenant": "alice"},
        {"name": "boss", "sha256": hash_key("sk-b"), "tenant": "alice", "admin": True},
        {"name": "slow", "sha256": hash_key("sk-c"), "tenant": "carol", "requests_per_minute": 1},
    ]
)
ALICE, BOSS, SLOW = ({"x-api-key": f"sk-{name}"} for name in "abc")


@dataclass
class Lines:
    raw: list[bytes] = field(default_factory=list)

    def take(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        lines, self.raw[:] = [json.loads(line) for line in self.raw], []
        return lines


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def served(serving: Serve, worker: ScriptedWorker, lines: Lines) -> Served:
    return await serving(keys=KEYS, audit=Audit(lines.raw.append, lambda: 86_400.5))


def event_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["event"], line.get("tenant"), line.get("key"), line.get("route"), line.get("status")


async def test_a_request_has_a_begin_and_an_end(served: Served, lines: Lines) -> None:
    lines.take()
    body = {"model": "demo", "prompt": [5] * 40, "user": "sk-a"}
    answer = await served.http.post(COMPLETION, json=body, headers=ALICE)
    begin, end = lines.take()
    who = {
        "time": "1970-01-02T00:00:00.500Z",
        "tenant": "alice",
        "key": "team-a",
        "admin": False,
        "source": "127.0.0.1",
        "request": answer.headers["x-request-id"],
        "route": "completions",
    }
    assert begin == {**who, "event": "request.start", "model": "demo"}
    assert 0 < end.pop("seconds") < 60
    assert end == {
        **who,
        "event": "request.end",
        "status": 200,
        "error": None,
        "model": "demo",
        "prompt_tokens": 40,
        "output_tokens": 4,
        "cached_tokens": 0,
        "repeat": False,
    }


async def test_the_end_tells_what_became_of_it(served: Served, worker: ScriptedWorker, lines: Lines) -> None:
    lines.take()
    await served.http.post(GENERATE, json={"prompt": "x", "model_name": "sk-a"}, headers=ALICE)
    begin, end = lines.take()
    assert (begin["model"], end["model"]) == (None, None), "a name that is no model's is not repeated"
    assert (end["status"], end["error"]) == (404, "model_not_found")
    worker.failure, worker.fails_after = ("engine_failure", "broken: sk-a", False), 2
    await served.http.post(GENERATE, json={"prompt": "x"}, headers=ALICE)
    _, end = lines.take()
    assert (end["status"], end["error"], end["output_tokens"]) == (200, "engine_failure", 2)
    assert "sk-a" not in json.dumps(end)
    worker.failure, worker.reply, worker.token_s = None, [(50, "x")] * 60, 0.01
    await read(served, GENERATE, {"prompt": "x", "max_tokens": 60}, events=5, x_api_key="sk-a")
    await until(lambda: len(lines.raw) == 2)
    _, end = lines.take()
    assert (end["status"], 4 <= end["output_tokens"] < 60) == (499, True)
    for expected in ([None, 200], [429]):  # who is over a limit is refused before anything is read, so nothing began
        await served.http.post(GENERATE, json={"prompt": "x", "max_tokens": 1}, headers=SLOW)
        assert [event_of(line)[4] for line in lines.take()] == expected


async def test_repeats_say_that_they_are(served: Served, worker: ScriptedWorker, lines: Lines) -> None:
    lines.take()
    keyed = {**ALICE, "idempotency-key": "k"}
    for repeat in (False, True):
        await served.http.post(GENERATE, json={"prompt": "x"}, headers=keyed)
        _, end = lines.take()
        assert (end["repeat"], end["output_tokens"]) == (repeat, 4)


async def test_reads_deletes_and_refusals(served: Served, lines: Lines) -> None:
    await served.http.post(GENERATE, json={"prompt": "x", "seq_id": "s"}, headers=ALICE)
    lines.take()
    for method, path, headers, status in (
        ("GET", "/sessions/s", ALICE, 200),
        ("GET", "/sessions/s/kv?layer=0", ALICE, 403),
        ("GET", "/sessions/s/kv?layer=0", BOSS, 200),
        ("DELETE", "/sessions/s", ALICE, 200),
        ("GET", "/metrics", ALICE, 403),
        ("GET", "/metrics", {}, 401),
        ("POST", GENERATE, {"authorization": "Bearer sk-wrong"}, 401),
        ("POST", "/sessions/s?key=sk-wrong", {"x-api-key": "sk-wrong"}, 405),
        ("GET", "/livez", {}, 200),
        ("GET", "/v1/models", ALICE, 200),
        ("GET", "/stats", BOSS, 200),
    ):
        assert (await served.http.request(method, path, headers=headers)).status_code == status, path
    found = lines.take()
    assert [event_of(line) for line in found] == [
        ("access", "alice", "team-a", "session_get", 200),
        ("access", "alice", "team-a", "session_kv", 403),
        ("access", "alice", "boss", "session_kv", 200),
        ("access", "alice", "team-a", "session_delete", 200),
        ("access", "alice", "team-a", "metrics", 403),
        ("auth.refused", None, None, "metrics", 401),
        ("auth.refused", None, None, "generate", 401),
    ]
    assert {line["session"] for line in found[:4]} == {session_key("alice", "s")}
    assert found[3]["method"] == "DELETE"
    assert "no API key" in found[5]["reason"]
    assert found[6]["reason"] == "this API key is not known"
    assert "sk-wrong" not in json.dumps(found)


async def test_a_flood_of_strangers_is_told_of_by_its_number(serving: Serve, worker: ScriptedWorker) -> None:
    """Not line by line: the log's queue is for what others did."""
    now, lines = 86_400.0, Lines()
    served = await serving(keys=KEYS, audit=Audit(lines.raw.append, lambda: now))
    for _ in range(3 * REFUSED_PER_ADDRESS):
        assert (await served.http.get("/v1/models")).status_code == 401
    await served.http.get("/sessions/s", headers=ALICE)
    assert [line["event"] for line in lines.take()] == ["auth.refused"] * REFUSED_PER_ADDRESS + ["access"]
    now += 60
    await served.http.get("/sessions/s", headers=ALICE)
    left_out, access = lines.take()
    assert (left_out["event"], left_out["count"]) == ("auth.left_out", 2 * REFUSED_PER_ADDRESS)
    assert access["event"] == "access"
    await served.http.get("/v1/models")
    assert [line["event"] for line in lines.take()] == ["auth.refused"]


async def test_concurrent_requests_do_not_mix(served: Served, worker: ScriptedWorker, lines: Lines) -> None:
    lines.take()
    bodies = [{"model": "demo", "prompt": [5] * (10 + n), "max_tokens": 1 + n % 4} for n in range(12)]
    keys = [ALICE, BOSS] * 6
    answers = await asyncio.gather(
        *(served.http.post(COMPLETION, json=body, headers=key) for body, key in zip(bodies, keys, strict=True))
    )
    ends = {line["request"]: line for line in lines.take() if line["event"] == "request.end"}
    assert len(ends) == 12
    for n, answer in enumerate(answers):
        end = ends[answer.headers["x-request-id"]]
        assert (end["prompt_tokens"], end["output_tokens"]) == (10 + n, 1 + n % 4)
        assert end["key"] == ("team-a", "boss")[n % 2]
