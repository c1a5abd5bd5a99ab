"""Work that may wait beside online work: what it costs the others, and what it makes of the rest.

    python -m benchmarks.durable_work [--quick]

A real fleet: a worker (the fake runner, whose steps cost time for each token), a placement, an ingress, NATS. Online
requests come at random times, the same ones with a batch and without, for half of what the worker can do. Rounds take
turns: online requests alone, both, and a batch of thousands of lines alone, which has the worker do all it can. A
worker's use is the share of the round that its tokens take at its pace, by its own counters; `used` is the use with
both over that of the batch alone. Value: the p99 of the online requests' TTFT with the batch over that without, of all
rounds' requests (--quick: of one round), as a round has too few for a p99 of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.harness.live_fleet import Fleet, Seen, one_server, percentile, prompt, read_with_client
from benchmarks.harness.report import finish, parse_quick, progress
from kvproto.client import Client
from kvproto.messages import Load

PREFILL, DECODE = 500.0, 125.0  # tokens/s of the worker: slow beside what a step costs in Python
PROMPT, TOKENS = 192, 6  # of an online request: 0.43 s of the worker
PER_S = 1.15  # requests
LINES, LINE_TOKENS = 1000, 100
FLOOR, LEAST_USED = 1.05, 0.95
SETTLE_S = 4.0


def load_of(client: Client) -> Load:
    (view,) = client.members.view.ready()
    assert view.heartbeat is not None
    return view.heartbeat.load


async def busy_s(client: Client) -> tuple[float, float]:
    """Seconds that the worker's tokens have taken so far, and when it said so: just now."""
    (view,) = client.members.view.ready()
    before = view.heartbeat_at
    while view.heartbeat_at == before:
        await asyncio.sleep(0.002)
    load = load_of(client)
    prefilled = load.fed_tokens_total - load.generated_tokens_total
    return prefilled / PREFILL + load.generated_tokens_total / DECODE, time.monotonic()


async def online(client: Client, seconds: float, base: int, seed: int = 0) -> list[float]:
    """TTFTs of requests that came in so many seconds."""
    chance, at, begins = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(PER_S)) < seconds:
        begins.append(at)
    began = time.monotonic()

    async def ask(number: int, begin: float) -> float:
        await asyncio.sleep(began + begin - time.monotonic())
        asked = time.monotonic()
        seen = await read_with_client(client, Seen(prompt(base + number, PROMPT), TOKENS))
        assert seen.ok, seen.error
        return seen.times[0] - asked

    return list(await asyncio.gather(*(ask(number, begin) for number, begin in enumerate(begins))))


async def begin_batch(http: httpx.AsyncClient, number: int) -> str:
    def line(at: int) -> str:
        body = {"model": "demo", "prompt": f"batch {number} line {at}", "max_tokens": LINE_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True}
        return json.dumps({"custom_id": f"c{at}", "method": "POST", "url": "/v1/completions", "body": body})

    data = "\n".join(map(line, range(LINES))).encode()
    file = (await http.post("/v1/files", files={"file": ("in", data)}, data={"purpose": "batch"})).json()["id"]
    said = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"}
    return str((await http.post("/v1/batches", json=said)).json()["id"])


async def measure(fleet: Fleet, *, rounds: int, seconds: float) -> dict[str, Any]:
    kinds = ("online", "both", "batch")
    ttfts: dict[str, list[float]] = {kind: [] for kind in kinds}
    used: dict[str, list[float]] = {kind: [] for kind in kinds}
    p99s: dict[str, list[float]] = {kind: [] for kind in kinds}
    done = 0
    client = await Client.open(fleet.nats_url)
    async with httpx.AsyncClient(base_url=fleet.base, timeout=30, trust_env=False) as http:
        await online(client, 3.0, 900_000)  # rates are measured
        for number in range(3 * rounds):
            kind = kinds[number % 3]
            batch = await begin_batch(http, number) if kind != "online" else ""
            await asyncio.sleep(SETTLE_S if batch else 1.0)
            before, began = await busy_s(client)
            told = [] if kind == "batch" else await online(client, seconds, number * 10_000, number // 3)
            if kind == "batch":
                await asyncio.sleep(seconds / 2)
            after, ended = await busy_s(client)
            ttfts[kind] += told
            p99s[kind] += [percentile(told, 0.99)] if told else []
            used[kind].append((after - before) / (ended - began))
            if batch:
                await http.post(f"/v1/batches/{batch}/cancel")
                while (said := (await http.get(f"/v1/batches/{batch}")).json())["status"] != "cancelled":
                    await asyncio.sleep(0.1)
                done += said["request_counts"]["completed"]
                while load_of(client).running:
                    await asyncio.sleep(0.1)
            said_p99 = f"p99 {1000 * p99s[kind][-1]:.1f} ms, " if told else ""
            progress(f"{kind}: {said_p99}use {used[kind][-1]:.3f}")
    await client.close()
    await client.connection.close()
    use = {kind: median(shares) for kind, shares in used.items()}
    return {
        "ratio": round(percentile(ttfts["both"], 0.99) / percentile(ttfts["online"], 0.99), 3),
        "used": round(use["both"] / use["batch"], 3),
        "use": {kind: round(share, 3) for kind, share in use.items()},
        "p99_ms": {kind: [round(1000 * one) for one in p99s[kind]] for kind in ("online", "both")},
        "p50_ms": {kind: round(1000 * median(ttfts[kind])) for kind in ("online", "both")},
        "requests": len(ttfts["both"]),
        "lines_done": done,
    }


def run(url: str, folder: Path, *, rounds: int, seconds: float) -> dict[str, Any]:
    pace = (f"--fake-tokens-per-s={DECODE:g}", f"--fake-prefill-tokens-per-s={PREFILL:g}", "--slots=12")
    fleet = Fleet(url, folder, *pace, "--blocks=4096", "--workers-on-host=1")
    try:
        fleet.init()
        fleet.start("placement", "p0")
        fleet.worker("w0")
        fleet.ingress()
        fleet.wait_ready(1)
        return asyncio.run(measure(fleet, rounds=rounds, seconds=seconds))
    finally:
        fleet.stop()


def main() -> None:
    quick = parse_quick(__doc__)
    with one_server() as (server, folder):
        told = run(server.url, folder, rounds=1 if quick else 5, seconds=40.0 if quick else 60.0)
    ratio = told.pop("ratio")
    ok = ratio <= FLOOR and told["used"] >= LEAST_USED
    finish("durable_work", ratio, "p99 TTFT", floor=FLOOR, ok=ok, peer="the same without a batch", **told)


if __name__ == "__main__":
    main()
