"""Our logits processor in vLLM against vLLM's own sampler: tokens/s of 16 streams, temperature 0.8 and top-p 0.9.

    python -m benchmarks.vllm_sampler [--quick]

The shape of Qwen2-0.5B, random weights, with its vocabulary of 151,936. One server has the processor and is asked both
ways in turn: it leaves requests without our parameters to vLLM's own sampler. Counted are tokens between the last
stream's first token and the last of all. vLLM draws fastest from one generator for all, and that is compared; with a
seed for each request, as a fleet's requests have, its rate is told too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from random import Random
from statistics import median
from typing import Any

from benchmarks.engine._engine_models import NATIVE, Name, model_folder
from benchmarks.harness.live_fleet import work_folder
from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.peers._vllm_servers import need_vllm, one_vllm
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet_vllm.wire import KEY, VERSION

NAME, UNIT, FLOOR = "vllm_sampler", "of vLLM's own sampler's tokens/s", 0.9
MODEL: Name = "qwen2-0.5b"
VOCAB, STREAMS, PROMPT = 151_936, 16, 16
TEMPERATURE, TOP_P = 0.8, 0.9

Sampling = Callable[[str, int], dict[str, Any]]  # of the request's name and seed


def own(name: str, seed: int) -> dict[str, Any]:
    return {"temperature": TEMPERATURE, "top_p": TOP_P}


def seeded(name: str, seed: int) -> dict[str, Any]:
    return own(name, seed) | {"seed": seed}


def ours(name: str, seed: int) -> dict[str, Any]:
    asked = {"temperature": TEMPERATURE, "top_p": TOP_P, "seed": seed, "max_tokens": 4096}
    row = {"version": VERSION, "request": name, "choice": 0, "prompt": PROMPT, "dropped": []}
    row |= {"stop_ids": [], "grammar": None, "failures": "/nonexistent"}
    return {"temperature": 0, "extra_args": {KEY: row | {"sampling": asked}}}


WAYS: dict[str, Sampling] = {"ours": ours, "own": own, "own_seeded": seeded}


async def rate(routes: TokenRoutes, way: Sampling, tokens: int, numbers: count[int], chance: Random) -> float:
    """Tokens/s while all streams run."""

    async def stream() -> list[float]:
        name, times = f"r{next(numbers)}", list[float]()
        body = {
            "request_id": name,
            "model": MODEL,
            "token_ids": [chance.randrange(VOCAB) for _ in range(PROMPT)],
            "stream": True,
            "sampling_params": {"max_tokens": tokens, "ignore_eos": True} | way(name, chance.getrandbits(60)),
        }
        async for part in routes.generate(body):
            times += [time.perf_counter()] * len(part.ids)
        assert len(times) == tokens
        return times

    streams = await asyncio.gather(*(stream() for _ in range(STREAMS)))
    began, ended = max(times[0] for times in streams), max(times[-1] for times in streams)
    return sum(at > began for times in streams for at in times) / (ended - began)


async def measure(url: str, rounds: int, tokens: int) -> dict[str, list[float]]:
    routes, numbers, chance = TokenRoutes(url), count(), Random(1)
    await routes.open()
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for way in WAYS.values():
        await rate(routes, way, 4, numbers, chance)
    for number in range(rounds):
        names = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
        for name in names:
            rates[name].append(await rate(routes, WAYS[name], tokens, numbers, chance))
        progress(f"round {number + 1}, tokens/s: " + ", ".join(f"{name} {rates[name][-1]:.1f}" for name in WAYS))
    await routes.close()
    return rates


def main() -> None:
    quick = parse_quick(__doc__)
    need_vllm(NAME, UNIT, FLOOR)
    flags = (f"--dtype={NATIVE[MODEL]}", "--max-model-len=1024")
    with work_folder() as folder, one_vllm(model_folder(MODEL), folder, *flags, name=MODEL) as server:
        rates = asyncio.run(measure(server.url, 3 if quick else 7, 24 if quick else 48))
    ratios = {
        name: round(median(ours / other for ours, other in zip(rates["ours"], rates[name], strict=True)), 3)
        for name in ("own", "own_seeded")
    }
    finish(
        NAME,
        ratios["own"],
        UNIT,
        floor=FLOOR,
        ok=ratios["own"] >= FLOOR,
        peer="vllm, the same server",
        against_own_with_seeds=ratios["own_seeded"],
        tokens_per_s={name: spread(values) for name, values in rates.items()},
        dtype=NATIVE[MODEL],
    )


if __name__ == "__main__":
    main()
