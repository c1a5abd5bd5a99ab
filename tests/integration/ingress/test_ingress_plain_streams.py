"""Streams of the OpenAI routes as simple clients read them: line by line, block by block, with OpenAI's package."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from cut_streams import Event, read, texts
from ingress_rig import Serve, Served
from scripted_worker import ScriptedWorker

from tests.support import sse

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": [{"role": "user", "content": "Speak."}]},
    COMPLETION: {"model": "demo", "prompt": "Speak"},
}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LONG = [(50 + n, f" word{n}") for n in range(24)]
SAID = "".join(text for _, text in LONG)
ASKS_FOR_IDS = {
    "nothing": {},
    "Accept": {"Accept": "application/json, text/event-stream; event-ids=1"},
    "Idempotency-Key": {"Idempotency-Key": "k"},
}


async def by_line(answer: httpx.Response) -> AsyncIterator[str]:
    """As `sglang.bench_serving` reads: every line that is not empty is data, or a comment."""
    async for line in sse.alines(answer):
        if line.strip() and not line.startswith(":"):
            yield line.removeprefix("data: ")


async def by_block(answer: httpx.Response) -> AsyncIterator[str]:
    """As `vllm bench serve` reads: what stands between blank lines is data, or a comment as a whole."""
    rest = ""
    async for data in answer.aiter_bytes():
        *blocks, rest = (rest + data.decode()).split("\n\n")
        for block in blocks:
            if block.strip() and not block.startswith(":"):
                yield block.removeprefix("data: ")


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("pieces", [by_line, by_block])
async def test_readers_of_data_lines_alone_lose_nothing(
    serving: Serve, worker: ScriptedWorker, path: str, pieces: Any
) -> None:
    """With comments before the first token and between tokens."""
    served = await serving(keepalive_s=0.02)
    worker.reply, worker.token_s = LONG, 0.05
    body = BODIES[path] | WITH_USAGE | {"max_tokens": len(LONG)}
    async with served.http.stream("POST", path, json=body) as answer:
        found = [piece async for piece in pieces(answer)]
    assert found.pop() == "[DONE]"
    chunks = [Event("", json.loads(piece)) for piece in found]
    assert texts(chunks) == {0: SAID}
    assert chunks[-1].data["usage"]["completion_tokens"] == len(LONG)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("asks", list(ASKS_FOR_IDS))
async def test_a_stream_has_id_lines_where_they_are_asked_for(served: Served, path: str, asks: str) -> None:
    answer = await served.http.post(path, json=BODIES[path] | WITH_USAGE, headers=ASKS_FOR_IDS[asks])
    events = [block.split("\n") for block in answer.text.split("\n\n")[:-1]]
    wanted = ["data"] if asks == "nothing" else ["id", "data"]
    assert {tuple(line.partition(": ")[0] for line in event) for event in events} == {tuple(wanted)}


async def test_generate_has_id_lines_always(served: Served) -> None:
    answer = await served.http.post("/generate", json={"prompt": "x"})
    assert all(block.startswith("id: ") for block in answer.text.split("\n\n")[:-1])


async def test_a_chunk_says_where_its_client_can_go_on(served: Served, worker: ScriptedWorker) -> None:
    """Without `id:` lines; a request that goes on has them."""
    worker.reply, worker.token_s = LONG, 0.005
    body = BODIES[CHAT] | WITH_USAGE | {"max_tokens": len(LONG)}
    before = await read(served, CHAT, body, events=9, accept="*/*")
    assert {event.id for event in before} == {""}
    at = before[-1].data["kvfleet"]["event_id"]
    assert at.startswith(before[-1].data["id"].removeprefix("chatcmpl-"))
    after = await read(served, CHAT, body, accept="*/*", last_event_id=at)
    assert all(event.id for event in after)
    assert texts(before + after) == {0: SAID}


class Watched(httpx.AsyncHTTPTransport):
    """Calls `on_data` with what comes, before its reader has it."""

    def __init__(self, on_data: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_data = on_data

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        stream, on_data = response.stream, self._on_data
        assert isinstance(stream, httpx.AsyncByteStream)

        class Passing(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                async for data in stream:
                    on_data(data)
                    yield data

            async def aclose(self) -> None:
                await stream.aclose()

        return httpx.Response(response.status_code, headers=response.headers, stream=Passing())


@pytest.mark.parametrize("asks", list(ASKS_FOR_IDS))
async def test_a_long_pause_ends_no_stream_of_openais_package(
    serving: Serve, worker: ScriptedWorker, asks: str
) -> None:
    """Between two tokens come as many comments as in 20 s: openai-python keeps the last id that it has read."""
    served = await serving(keepalive_s=0.02)
    worker.stalls_at = 2
    comments = 0

    def heard(data: bytes) -> None:
        nonlocal comments
        comments += data.count(b": waiting\n")
        if comments >= 4:
            worker.held.set()

    http = httpx.AsyncClient(transport=Watched(heard))
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0, http_client=http) as client:
        stream: Any = await client.chat.completions.create(
            **BODIES[CHAT], stream=True, extra_headers=ASKS_FOR_IDS[asks]
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert comments >= 4
    assert "".join(pieces) == "Hello!"
