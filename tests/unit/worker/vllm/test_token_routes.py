"""The client of vLLM's token routes against a server that answers as vLLM 0.32 does, or as no vLLM would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest
from aiohttp import web

from kvfleet.worker.vllm.token_routes import ABORT, GENERATE, NextTokens, TokenRoutes
from kvproto.errors import ContextLengthExceeded, EngineFailure, InvalidRequest, KvfleetError, ModelNotFound
from kvproto.messages import TokenLogprobs

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """`answer` is what the generate route does."""

    def __init__(self) -> None:
        self.answer: Handler
        self.asked: list[tuple[str, Any]] = []
        self.left = asyncio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._on)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.path, orjson.loads(body) if body else None))
        if request.path == GENERATE:
            try:
                return await self.answer(request)
            except asyncio.CancelledError:
                self.left.set()
                raise
        return web.json_response({})

    def streams(self, *lines: str, then: Callable[[], Awaitable[None]] | None = None) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for line in lines:
                await response.write(f"data: {line}\n\n".encode())
            if then is not None:
                await then()
            return response

        self.answer = answer

    def refuses(self, status: int, text: str) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(status=status, text=text)

        self.answer = answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    server.url = await server.start()  # type: ignore[attr-defined]
    yield server
    await server.runner.cleanup()


@pytest.fixture
async def routes(server: Server) -> AsyncIterator[TokenRoutes]:
    routes = TokenRoutes(server.url + "/")  # type: ignore[attr-defined]
    await routes.open()
    yield routes
    await routes.close()


def chunk(*ids: int, finish: str | None = None, stop: int | None = None, **more: Any) -> str:
    choice = {"index": 0, "finish_reason": finish, "stop_reason": stop, "token_ids": list(ids), "logprobs": None}
    return orjson.dumps({"request_id": "x", "usage": None, "choices": [choice | more]}).decode()


async def test_a_stream(server: Server, routes: TokenRoutes) -> None:
    server.streams(chunk(5), chunk(6, 7), chunk(8, finish="stop", stop=8), "[DONE]")
    body = {"request_id": "a", "token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}
    assert [one async for one in routes.generate(body)] == [
        NextTokens((5,)), NextTokens((6, 7)), NextTokens((8,), (), "stop", 8),
    ]  # fmt: skip
    assert server.asked == [(GENERATE, body)]


async def test_log_probabilities(server: Server, routes: TokenRoutes) -> None:
    """The drawn token of rank 9 stands first in vLLM's list, and is no alternative."""
    best = [{"token_id": 3, "logprob": -0.5, "rank": 1}, {"token_id": 4, "logprob": -1.0, "rank": 2}]
    drawn = {"token_id": 22, "logprob": -3.5, "rank": 9}
    first = drawn | {"top_logprobs": [drawn, *best]}
    second = best[0] | {"top_logprobs": [*best, {"token": "token_id:2", "logprob": -1.0}]}  # as vLLM before 0.32
    server.streams(chunk(22, 3, logprobs={"content": [first, second]}), chunk(finish="length"), "[DONE]")
    parts = [one async for one in routes.generate({}, 2)]
    assert parts[0] == NextTokens(
        (22, 3), (TokenLogprobs(-3.5, (3, 4), (-0.5, -1.0)), TokenLogprobs(-0.5, (3, 2), (-0.5, -1.0)))
    )


@pytest.mark.parametrize(
    ("status", "text", "kind", "says"),
    [
        (400, '{"error":{"message":"top_p must be in (0, 1]","code":400}}', InvalidRequest, "top_p must be"),
        (400, '{"error":{"message":"the model\'s maximum context length is 5"}}', ContextLengthExceeded, "length is 5"),
        (404, '{"error":{"message":"The model `x` does not exist."}}', ModelNotFound, "`x`"),
        (500, "Internal Server Error", EngineFailure, "Internal Server Error"),
        (403, "<html>" + "x" * 5000, EngineFailure, "403"),
        (400, "[]", InvalidRequest, "[]"),
        (502, '{"error": null}', EngineFailure, "502"),
    ],
)
async def test_a_refusal(
    server: Server, routes: TokenRoutes, status: int, text: str, kind: type[KvfleetError], says: str
) -> None:
    server.refuses(status, text)
    with pytest.raises(KvfleetError) as caught:
        _ = [one async for one in routes.generate({})]
    assert isinstance(caught.value, kind)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "lines",
    [
        [chunk(5)],  # no end
        [chunk(5), '{"error": {"message": "the engine is dead", "code": 500}}'],
        ["nonsense"],
        ["[]"],
        ['{"choices": 5}'],
        ['{"choices": [{}]}'],
        ['{"choices": [], "usage": {"x": 1}}'],
    ],
)
async def test_what_is_no_stream_is_the_engines_failure(server: Server, routes: TokenRoutes, lines: list[str]) -> None:
    server.streams(*lines)
    with pytest.raises(EngineFailure):
        _ = [one async for one in routes.generate({})]


async def test_a_refusal_after_the_first_byte_is_the_requests_own_fault(server: Server, routes: TokenRoutes) -> None:
    """As `validate_params` of a logits processor refuses: with 200, then an error of code 400."""
    server.streams('{"error": {"message": "another version", "type": "BadRequestError", "code": 400}}', "[DONE]")
    with pytest.raises(InvalidRequest, match="another version"):
        _ = [one async for one in routes.generate({})]


async def test_a_server_that_dies_in_the_middle(server: Server, routes: TokenRoutes) -> None:
    async def die() -> None:
        for connection in list(server.runner.server.connections):  # type: ignore[union-attr]
            connection.transport.abort()

    server.streams(chunk(5), then=die)
    seen = []
    with pytest.raises(EngineFailure, match=r"is gone|before its end"):
        async for one in routes.generate({}):
            seen.append(one)
    assert seen in ([], [NextTokens((5,))])


async def test_nobody_is_there() -> None:
    routes = TokenRoutes("http://127.0.0.1:1")
    await routes.open()
    with pytest.raises(EngineFailure, match=r"127\.0\.0\.1:1 is gone"):
        _ = [one async for one in routes.generate({})]
    with pytest.raises(EngineFailure, match="does not answer"):
        await routes.get("/health")
    await routes.close()


async def test_leaving_closes_the_connection(server: Server, routes: TokenRoutes) -> None:
    server.streams(chunk(5), then=lambda: asyncio.sleep(60))

    async def read() -> None:
        async for _ in routes.generate({}):
            reading.set()

    reading = asyncio.Event()
    task = asyncio.create_task(read())
    await asyncio.wait_for(reading.wait(), 10)
    task.cancel()
    await asyncio.wait_for(server.left.wait(), 10)


async def test_an_abort_names_the_id_as_vllm_knows_it(server: Server, routes: TokenRoutes) -> None:
    await routes.abort("a")
    assert server.asked == [(ABORT, {"request_ids": ["generate-tokens-a"]})]


# ---------------------------------------------------------------------- scores of a prompt

SCORING = {"token_ids": [7, 3, 22], "sampling_params": {"prompt_logprobs": 2}}


def told(*entries: Any) -> str:
    return orjson.dumps({"choices": [{"token_ids": [5]}], "prompt_logprobs": list(entries)}).decode()


def entry(logprob: float, rank: int | None = None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": None}


async def test_scores_of_a_prompt(server: Server, routes: TokenRoutes) -> None:
    """A token beyond the best ones stands first in vLLM's list, and is no alternative; equal ones come in id order."""
    server.refuses(200, told(None, {"3": entry(-0.5, 1), "9": entry(-1.0, 2)},
                             {"22": entry(-9.0, 70), "8": entry(-1.0, 1), "4": entry(-1.0, 2)}))  # fmt: skip
    assert await routes.score(SCORING) == (
        TokenLogprobs(-0.5, (3, 9), (-0.5, -1.0), 1),
        TokenLogprobs(-9.0, (4, 8), (-1.0, -1.0), 70),
    )


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        "{}",
        '{"prompt_logprobs": null}',
        told(None, {"3": entry(-0.5, 1)}),  # too few
        told(None, None, {"22": entry(-0.5, 1)}),
        told(None, {"4": entry(-0.5, 1)}, {"22": entry(-0.5, 1)}),  # not of the prompt's token
        told(None, {"3": {}}, {"22": entry(-0.5, 1)}),
        told(None, 5, {"22": entry(-0.5, 1)}),
    ],
)
async def test_what_is_no_scores_is_the_engines_failure(server: Server, routes: TokenRoutes, text: str) -> None:
    server.refuses(200, text)
    with pytest.raises(EngineFailure, match="scores"):
        await routes.score(SCORING)


async def test_a_refusal_to_score(server: Server, routes: TokenRoutes) -> None:
    server.refuses(400, '{"error":{"message":"prompt_logprobs of 99"}}')
    with pytest.raises(InvalidRequest, match="of 99"):
        await routes.score(SCORING)


async def test_a_server_that_dies_while_it_scores(server: Server, routes: TokenRoutes) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server.answer = die
    with pytest.raises(EngineFailure, match="is gone"):
        await routes.score(SCORING)
