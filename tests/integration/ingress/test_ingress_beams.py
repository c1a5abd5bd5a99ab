"""Beam search through an ingress: what reaches a worker, how its answer streams, and fleets that cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from ingress_rig import Served, serve
from scripted_worker import ScriptedWorker

from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

ASKED = {
    "model": "demo",
    "prompt": "x",
    "max_tokens": 30,
    "ignore_eos": True,
    "n": 2,
    "use_beam_search": True,
    "best_of": 3,
}
PACE = 60.0  # tokens in a second: a search takes 1.5


@pytest.fixture
async def searching(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Served]:
    fleet = FakeFleet(nats_url, fleet_buckets)
    await fleet.start("w1", fake_tokens_per_s=PACE)
    served = await serve(nats_url, fleet_buckets)
    async with asyncio.timeout(LIMIT_S):
        while "demo" not in (await served.http.get("/v1/models")).text:
            await asyncio.sleep(0.05)
    yield served
    await served.stop()
    await fleet.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASKED),
        ("/v1/chat/completions", {**ASKED, "prompt": None, "messages": [{"role": "user", "content": "x"}]}),
        ("/generate", {"prompt": "x", "max_tokens": 30, "use_beam_search": True, "best_of": 3}),
    ],
)
async def test_a_stream_is_kept_open_until_all_of_it_comes(
    searching: Served, path: str, body: dict[str, object]
) -> None:
    loop, times, events, comments = asyncio.get_running_loop(), list[float](), [], list[float]()
    began = loop.time()
    streamed = body if path == "/generate" else {**body, "stream": True}
    async with searching.http.stream("POST", path, json=streamed) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(loop.time() - began)
                events.append(json.loads(line.removeprefix("data: ")))
            elif line.startswith(":"):
                comments.append(loop.time() - began)
    tokens = [at for at, event in zip(times, events, strict=True) if _text_of(event)]
    assert min(tokens) > 1.0
    assert max(tokens) - min(tokens) < 0.5
    assert len([at for at in comments if at < min(tokens)]) >= 3


def _text_of(event: dict[str, object]) -> object:
    if "choices" not in event:
        return event.get("token")
    return any(one.get("text") or one.get("delta", {}).get("content") for one in event["choices"])  # type: ignore[attr-defined]


async def test_a_fleet_that_searches_no_beams_says_so(served: Served, worker: ScriptedWorker) -> None:
    answer = await served.http.post("/v1/completions", json=ASKED)
    assert answer.status_code == 503
    assert "searches no beams" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "use_beam_search"
    assert worker.requests == []
    plain = {key: value for key, value in ASKED.items() if key not in ("use_beam_search", "best_of")}
    assert (await served.http.post("/v1/completions", json=plain)).status_code == 200


async def test_each_beam_counts_as_a_choice(searching: Served) -> None:
    admission = searching.ingress.admission
    asking = asyncio.create_task(searching.http.post("/v1/completions", json=ASKED))
    async with asyncio.timeout(LIMIT_S):
        while not admission.choices:
            await asyncio.sleep(0.01)
    assert admission.choices == 3
    answer = (await asking).json()
    assert admission.choices == 0
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 60
