"""Our sampler inside vLLM: a stream that is cut and goes on as another request draws what it would have drawn."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest

from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet_vllm.wire import KEY, VERSION
from kvproto.errors import InvalidRequest
from kvproto.messages import Sampling
from tests.support.tiny_llama import STOPS, VOCAB

TOKENS = 24
NUMBERS = count()
ASKED = [
    Sampling(TOKENS, temperature=0.9, seed=11),
    Sampling(TOKENS, temperature=0.9, top_p=0.95, seed=2**63 + 5),
    Sampling(TOKENS, temperature=1.3, top_k=50, min_p=0.01, seed=3),
    Sampling(TOKENS, temperature=0.7, seed=4, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    Sampling(TOKENS, temperature=1.0, seed=6, logit_bias={9: 50.0, 3: -100.0}, min_tokens=8),
]


def prompt_of(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCAB) for _ in range(chance.randrange(5, 150))]


def body(prompt: list[int], wants: Sampling, before: list[int], version: int = VERSION) -> dict[str, Any]:
    request = f"sampled-{next(NUMBERS)}"
    fields = {name: value for name, value in asdict(wants).items() if value is not None}
    asked = {
        "version": version, "request": request, "choice": 0, "prompt": len(prompt), "dropped": [],
        "stop_ids": STOPS,
        "sampling": fields | {"logit_bias": {str(token): value for token, value in wants.logit_bias.items()}},
        "failures": "/nowhere", "grammar": None,
    }  # fmt: skip
    params = {
        "temperature": 0, "max_tokens": TOKENS - len(before), "ignore_eos": True, "extra_args": {KEY: asked},
    }  # fmt: skip
    return {"request_id": request, "token_ids": [*prompt, *before], "stream": True, "sampling_params": params}


async def drawn(routes: TokenRoutes, prompt: list[int], wants: Sampling, before: list[int]) -> list[int]:
    parts = [part async for part in routes.generate(body(prompt, wants, before))]
    return [token for part in parts for token in part.ids]


@pytest.mark.parametrize("wants", ASKED, ids=range(len(ASKED)))
async def test_a_cut_stream_goes_on_as_if_it_were_whole(routes: TokenRoutes, wants: Sampling) -> None:
    """All at once: which rows are computed together must not matter."""
    prompts = [prompt_of(seed) for seed in range(4)]
    whole = await asyncio.gather(*(drawn(routes, prompt, wants, []) for prompt in prompts))
    cuts = [(at, cut) for at in range(len(prompts)) for cut in (0, 1, 7, 23)]
    rest = await asyncio.gather(*(drawn(routes, prompts[at], wants, whole[at][:cut]) for at, cut in cuts))
    assert rest == [whole[at][cut:] for at, cut in cuts]


async def test_another_seed_draws_something_else(routes: TokenRoutes) -> None:
    one, other = [await drawn(routes, prompt_of(0), Sampling(TOKENS, seed=seed), []) for seed in (1, 2)]
    assert one != other


async def test_another_version_is_refused_by_name(routes: TokenRoutes) -> None:
    with pytest.raises(InvalidRequest, match=f"version {VERSION + 1}"):
        _ = [part async for part in routes.generate(body([5], ASKED[0], [], VERSION + 1))]
