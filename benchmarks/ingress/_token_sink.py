"""An ingress without HTTP: a Client that reads many streams and counts their tokens.

    python -m benchmarks.ingress._token_sink NATS_URL SINK STREAMS TOKENS WORKERS

It asks for STREAMS streams of TOKENS tokens for every line of stdin, from as many different workers as there are, and
answers with one JSON line: when its first token came and its last, in seconds of the machine's monotonic clock, and its
own CPU from before the requests on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import uvloop

from benchmarks.harness.processes import cpu_seconds
from benchmarks.ingress._token_source import name_of
from kvproto.client import Client
from kvproto.messages import Sampling, Tokens
from kvproto.streams.generation import Generation


async def read(client: Client, worker: str, prompt: int, tokens: int) -> tuple[float, int]:
    """When its first token came, and how many there were."""
    first, count = 0.0, 0
    wanted = Generation("demo", Sampling(tokens, temperature=0.0, ignore_eos=True), prompt_ids=(prompt,), worker=worker)
    async with client.generate(wanted) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                first = first or time.monotonic()
                count += len(event.ids)
    return first, count


async def main(url: str, sink: int, streams: int, tokens: int, workers: int) -> None:
    client = await Client.open(url)
    print("ready", flush=True)
    loop, apart = asyncio.get_running_loop(), max(1, workers // streams)
    while await loop.run_in_executor(None, sys.stdin.readline):
        before = cpu_seconds(os.getpid())
        reads = (
            read(client, name_of((i * apart + sink) % workers), sink * streams + i, tokens) for i in range(streams)
        )
        done = await asyncio.gather(*reads)
        answer = {
            "first": min(first for first, _ in done),
            "last": time.monotonic(),
            "tokens": sum(count for _, count in done),
            "cpu_s": cpu_seconds(os.getpid()) - before,
            "resends": client.counters.resends_total,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], *map(int, sys.argv[2:6])))
