"""Time to first token at a vLLM worker of a turn whose history is cold, or in a vault, or on its device.

    python -m benchmarks.vllm_vault [--quick]

Two vLLM servers in the shape of Qwen2-0.5B, random weights, on a core each, with a worker each, and a vault. A turn is
a history of 2,000 tokens, which is new in each round, and 16 new ones. One worker computes it, which saves it to the
vault; the other one finds it there; then it has it itself. They take turns. Value: the median of cold over vault.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.engine._engine_models import Name, model_folder
from benchmarks.harness.live_fleet import Fleet, Seen, one_server, read_with_client
from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.peers._vllm_servers import FLEET_READY_S, READY_S, cores, need_vllm, start_server, worker_beside
from kvproto.client import Client

NAME, UNIT, FLOOR = "vllm_vault", "times sooner than cold, from a vault, 2,000 tokens", 5.0
MODEL: Name = "qwen2-0.5b"
VOCAB, HISTORY, NEW, BLOCK = 151_936, 2_000, 16, 32
WAYS = ("cold", "vault", "device")
SAVED_S = 60.0
SETTLED_S = 3.0  # the last turns' blocks are written, and heartbeats have told so


async def first(client: Client, worker: str, history: list[int], chance: Random) -> tuple[float, Seen]:
    """Seconds to the first token of a turn at that worker."""
    prompt = (*history, *(chance.randrange(VOCAB) for _ in range(NEW)))
    began = time.monotonic()
    seen = await read_with_client(client, Seen(prompt, 1), model=MODEL, worker=worker)
    if seen.error:
        raise SystemExit(f"a turn was broken: {seen.error}")
    return seen.times[0] - began, seen


async def written(base: str, worker: str) -> int:
    """Blocks that the worker has written to vaults."""
    async with httpx.AsyncClient(trust_env=False) as http:
        known = (await http.get(f"{base}/workers")).json()[worker]
    return int(known["load"]["tiers"]["vault"]["offloaded_blocks_total"])


async def saved(base: str, worker: str, blocks: int) -> None:
    """Waits until it has written so many."""
    until = time.monotonic() + SAVED_S
    while (done := await written(base, worker)) < blocks:
        if time.monotonic() > until:
            raise SystemExit(f"{worker} has written {done} of {blocks} blocks within {SAVED_S} s")
        await asyncio.sleep(0.1)


async def measure(fleet: Fleet, rounds: int) -> dict[str, list[float]]:
    chance, taken = Random(1), {way: list[float]() for way in WAYS}
    async with await Client.open(fleet.nats_url) as client:
        for number in range(-2, rounds):  # one of each worker to warm up
            here, there = ("w0", "w1") if number % 2 == 0 else ("w1", "w0")
            history = [chance.randrange(VOCAB) for _ in range(HISTORY)]
            await asyncio.sleep(SETTLED_S)
            before = await written(fleet.base, here)
            found: dict[str, tuple[float, Seen]] = {"cold": await first(client, here, history, chance)}
            await saved(fleet.base, here, before + HISTORY // BLOCK)
            for way in ("vault", "device"):
                found[way] = await first(client, there, history, chance)
                cached = found[way][1].starts[0].cached
                if cached.get(way, 0) < HISTORY // BLOCK * BLOCK - 2 * BLOCK:
                    raise SystemExit(f"{way}: only {cached} of {HISTORY} tokens")
            if number >= 0:
                for way in WAYS:
                    taken[way].append(found[way][0])
            shown = ", ".join(f"{way} {found[way][0] * 1000:.1f}" for way in WAYS)
            progress(f"round {number + 1}: {shown} ms")
    return taken


def main() -> None:
    quick = parse_quick(__doc__)
    need_vllm(NAME, UNIT, FLOOR)
    with one_server() as (nats, folder):
        fleet = Fleet(nats.url, folder)
        fleet.init()
        servers: list[Any] = []
        try:
            for core in (cores() * 2)[:2]:
                servers.append(start_server(model_folder(MODEL), folder, core, name=MODEL))
            fleet.start("vault", "v0", f"--max-bytes={2 << 30}")
            fleet.start("placement", "p0")
            fleet.ingress()
            for number, server in enumerate(servers):
                server.wait_ready(READY_S)
                worker_beside(fleet, f"w{number}", server, f"--block-size={BLOCK}", f"--host-bytes={1 << 30}")
            fleet.wait_ready(2, FLEET_READY_S)
            taken = asyncio.run(measure(fleet, 4 if quick else 8))
        finally:
            for server in servers:
                server.stop()
            fleet.stop()
    ratio = median(cold / vault for cold, vault in zip(taken["cold"], taken["vault"], strict=True))
    finish(
        NAME,
        round(ratio, 2),
        UNIT,
        floor=FLOOR,
        ok=ratio >= FLOOR,
        peer="vllm, nothing cached",
        vault_over_device=round(median(taken["vault"]) / median(taken["device"]), 2),
        seconds={way: spread(values) for way, values in taken.items()},
        dtype="float32",
    )


if __name__ == "__main__":
    main()
