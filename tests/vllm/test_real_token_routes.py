"""The client of vLLM's token routes against vLLM itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvfleet.worker.vllm.token_routes import NextTokens, TokenRoutes
from kvproto.errors import ContextLengthExceeded, InvalidRequest, KvfleetError, ModelNotFound
from tests.support.tiny_llama import CONTEXT, VOCAB

PROMPT = [3 + i * 7 % 1000 for i in range(100)]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def body(request: str, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    return {"request_id": request, "token_ids": prompt, "stream": True, "sampling_params": GREEDY, **more}


async def test_a_greedy_stream(routes: TokenRoutes) -> None:
    asked: dict[str, Any] = {"cache_salt": "of this test"}
    first, second = [[part async for part in routes.generate(body(name, **asked))] for name in "ab"]
    assert len([token for part in first for token in part.ids]) == 24
    assert (first[-1].finish, first[-1].stop) == ("length", None)
    assert first == second


async def test_log_probabilities(routes: TokenRoutes) -> None:
    """Of greedy decoding the drawn token is the first of the best."""
    asked = body("logprobs", sampling_params=GREEDY | {"logprobs": 6})
    parts = [part async for part in routes.generate(asked, 5)]
    for part in parts:
        (token,), (logprobs,) = part.ids, part.logprobs
        assert len(logprobs.top_ids) == 5
        assert (logprobs.top_ids[0], logprobs.top_logprobs[0]) == (token, logprobs.logprob)


async def test_a_stop_id_ends_it(routes: TokenRoutes) -> None:
    ids = [token async for part in routes.generate(body("whole")) for token in part.ids]  # type: ignore[union-attr]
    stop = ids[5]
    asked = body("stopped", sampling_params=GREEDY | {"stop_token_ids": [stop]})
    parts = [part async for part in routes.generate(asked)]
    assert [token for part in parts for token in part.ids] == ids[: ids.index(stop) + 1]
    assert (parts[-1].finish, parts[-1].stop) == ("stop", stop)


async def test_an_abort_ends_it(routes: TokenRoutes) -> None:
    parts: list[NextTokens] = []
    async for part in routes.generate(body("aborted", sampling_params=GREEDY | {"max_tokens": 1900})):
        if not parts:
            await routes.abort("aborted")
        parts.append(part)
    assert parts[-1] == NextTokens((), (), "abort")
    assert len(parts) < 1900


async def test_leaving_ends_it(routes: TokenRoutes) -> None:
    async def running() -> float:
        lines = (await routes.get("/metrics")).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    async def read() -> None:
        async for _ in routes.generate(body("left", sampling_params=GREEDY | {"max_tokens": 1900})):
            began.set()

    began = asyncio.Event()
    reader = asyncio.create_task(read())
    await began.wait()
    assert await running() == 1
    reader.cancel()
    async with asyncio.timeout(20):
        while await running():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"token_ids": [5] * CONTEXT}, ContextLengthExceeded, str(CONTEXT)),
        ({"token_ids": [5, VOCAB]}, InvalidRequest, str(VOCAB)),
        ({"token_ids": []}, InvalidRequest, ""),
        ({"sampling_params": {"top_p": 2}}, InvalidRequest, "top_p"),
        ({"model": "another"}, ModelNotFound, "another"),
    ],
)  # fmt: skip
async def test_refusals(routes: TokenRoutes, change: dict[str, Any], kind: type[KvfleetError], says: str) -> None:
    with pytest.raises(KvfleetError) as caught:
        _ = [part async for part in routes.generate(body("refused") | change)]
    assert type(caught.value) is kind, caught.value
    assert says in str(caught.value)
