"""How long running streams wait for their next token while long prompts arrive, in a fleet with a worker for each half.

    python -m benchmarks.prefill_decode_roles [--quick]

Real processes: NATS, a placement, a prefill worker and a decode worker. Both pretend to be accelerators of one speed
(the fake runner: it sleeps as long as they would compute, so a core is no bottleneck; its blocks are real, and are
compared). 32 streams decode. Calm seconds alternate with seconds in which one 4,000-token prompt after the other
arrives: it is prefilled at the one worker, its blocks go over meanwhile, and it goes on at the other. The value is the
p99 of the time between two tokens of a stream while prompts arrive, over that of calm: it must not exceed the floor.
Beside it: the same load on the same two processes that serve whole requests. Every answer is checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.harness.live_fleet import Fleet, Seen, one_server, prompt, read_with_client
from benchmarks.harness.report import finish, parse_quick, progress
from kvproto.client import Client

STREAMS, ARRIVING, OUTPUT = 32, 4_000, 4
DECODE, PREFILL = 320, 10_000  # tokens/s: a step of all streams takes 100 ms, a prompt 400 ms
CALM_S, BUSY_S, ROUNDS, FLOOR = 5.0, 5.0, 6, 1.1
READY_S = 200.0  # of a busy machine
FAR = 10_000  # numbers of prompts of streams and of arrivals are far from one another
PAIR, WHOLE = ("prefill", "decode"), ("both", "both")


@dataclass
class Gaps:
    """Between tokens of streams, in seconds, and what became of the prompts that arrived."""

    calm: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    arrived: list[Seen] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return quantiles(self.busy, n=100)[98] / quantiles(self.calm, n=100)[98]


def between(streams: list[Seen], began: float, ended: float) -> list[float]:
    return [
        later - sooner
        for one in streams
        for sooner, later in zip(one.times, one.times[1:], strict=False)
        if began < sooner and later < ended
    ]


@asynccontextmanager
async def fleet_of(roles: tuple[str, ...], url: str, folder: Path) -> AsyncIterator[Client]:
    folder.mkdir()
    pace = f"--fake-tokens-per-s={DECODE}", f"--fake-prefill-tokens-per-s={PREFILL}"
    fleet = Fleet(url, folder, "--drain-s=1", "--preload-s=0", *pace)
    fleet.init()
    client = await Client.open(url)
    try:
        fleet.start("placement", f"p-{folder.name}")
        for number, role in enumerate(roles):
            fleet.worker(f"w{number}-{role}-{folder.name}", f"--role={role}")
        fleet.ingress()
        await asyncio.to_thread(fleet.wait_ready, len(roles), READY_S)
        yield client
    finally:
        await client.close()
        fleet.stop()


async def measure(client: Client, rounds: int) -> Gaps:
    """Streams that read to the end, one calm stretch and one with arrivals after the other."""
    seconds = rounds * (CALM_S + BUSY_S) + 3
    streams = [Seen(prompt(number), int(seconds * DECODE / STREAMS)) for number in range(STREAMS)]
    reading = [asyncio.create_task(read_with_client(client, one)) for one in streams]
    while not all(len(one.times) > 1 for one in streams):
        await asyncio.sleep(0.05)
    gaps = Gaps()
    for _ in range(rounds):
        began = time.monotonic()
        await asyncio.sleep(CALM_S)
        turned = time.monotonic()
        gaps.calm += between(streams, began, turned)
        while time.monotonic() < turned + BUSY_S:
            one = Seen(prompt(FAR + len(gaps.arrived), ARRIVING), OUTPUT)
            asked = time.monotonic()
            gaps.arrived.append(await read_with_client(client, one))
            gaps.ttfts.append(one.times[0] - asked if one.times else 0.0)
        gaps.busy += between(streams, turned, time.monotonic())
        progress(
            f"calm p99 {quantiles(gaps.calm, n=100)[98]:.4f} s, {len(gaps.arrived)} prompts: {gaps.ratio:.2f} times"
        )
    await asyncio.gather(*reading)
    wrong = [one.error or "wrong tokens" for one in (*streams, *gaps.arrived) if not one.ok]
    if wrong:
        raise SystemExit(f"{len(wrong)} answers are wrong, the first: {wrong[0]}")
    return gaps


def figures(gaps: Gaps) -> dict[str, float]:
    calm, busy = quantiles(gaps.calm, n=100), quantiles(gaps.busy, n=100)
    return {
        "calm_p50_s": round(calm[49], 4),
        "calm_p99_s": round(calm[98], 4),
        "busy_p50_s": round(busy[49], 4),
        "busy_p99_s": round(busy[98], 4),
        "prompts": len(gaps.arrived),
        "ttft_p50_s": round(median(gaps.ttfts), 4),
        "second_token_p50_s": round(median(one.times[1] - one.times[0] for one in gaps.arrived), 4),
        "moved": sum(one.attempts > 1 for one in gaps.arrived),
    }


async def run(url: str, folder: Path, rounds: int) -> tuple[Gaps, Gaps]:
    found = []
    for name, roles in (("pair", PAIR), ("whole", WHOLE)):
        progress(f"two workers: {', '.join(roles)}")
        async with fleet_of(roles, url, folder / name) as client:
            found.append(await measure(client, rounds))
    return found[0], found[1]


def main() -> None:
    rounds = 2 if parse_quick(__doc__) else ROUNDS
    with one_server() as (server, folder):
        apart, whole = asyncio.run(run(server.url, folder, rounds))
    finish(
        "prefill_decode_roles",
        round(apart.ratio, 2),
        "times the calm p99, at most",
        floor=FLOOR,
        ok=apart.ratio <= FLOOR,
        peer="the same streams without arrivals",
        whole_ratio=round(whole.ratio, 2),
        apart=figures(apart),
        whole=figures(whole),
        streams=STREAMS,
        arriving_tokens=ARRIVING,
    )


if __name__ == "__main__":
    main()
