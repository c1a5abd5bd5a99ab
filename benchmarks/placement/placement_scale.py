"""What one placement takes in, and what replicas share: fake fleets of 64 and 1,000 workers over a real nats-server.

    python -m benchmarks.placement_scale [--quick]

* start: 64 workers of 16,384 blocks, and a fresh replica while requests keep coming: seconds until it knows everybody's
  blocks, and how it answered meanwhile;
* base: records each second, heartbeats twice a second, nothing asked, no events: cores and memory, what watches bring
  to each worker, and the vault's connections and threads;
* events: 16 blocks stored and 16 removed each, at growing rates, 100 requests/s beside them: cores, latency, snapshots
  that had to be pulled;
* decisions: as many requests as are answered, 32 at a time;
* replicas: 1, 2 and 4 of them at one rate of requests and events: who answered how much, cores and knowledge of each.

The 1,000 workers hold 1,000 blocks each, and placement is set to follow all of them (`--max-workers`); as it comes it
has room for fewer, which the part `as it comes` counts. A rate of events is taken in if
afterwards each worker's last event is known with no snapshot pulled for it, and no request waited 50 ms.

The value is the seconds of `start`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.placement._requester import Requester
from benchmarks.placement._scale_bench import ScaleBench, rss_mb, scale_bench, threads
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvproto.hash_ring import HashRing

FLOOR_S = 5.0  # until a fresh replica knows 64 workers of 16,384 blocks
HALF, WHOLE = 64, 128  # blocks of a worker's own chain that it holds before and after it has grown
OPERATIONS = 32  # of an event
EVENT_RATES = (500, 2_000, 8_000, 16_000, 24_000, 32_000)
ASIDE = 100.0  # requests/s beside events
PATIENCE_MS = 50.0  # after which a Client places by itself
REPLICA_RATE, REPLICA_EVENTS = 400.0, 1_000.0
AT_ONCE = 32


def some(workers: int, most: int = 64) -> list[int]:
    """Numbers of workers that are asked about, evenly spread."""
    return list(range(0, workers, max(1, workers // most)))[:most]


async def start(bench: ScaleBench, requester: Requester) -> dict[str, Any]:
    """A replica that nobody helps: from its process's start until it knows everything, asked all the while."""
    began = bench.start_placement("p0")
    asking = asyncio.create_task(requester.paced(ASIDE, 4.0))
    await bench.until_ready(requester)
    ready = asyncio.get_running_loop().time()
    known = await bench.until_known(requester, HALF, some(bench.workers))
    asked = await asking
    sums = await bench.tell_fleet(requester)
    report = {
        "complete_s": round(known - began, 2),
        "complete_after_ready_s": round(known - began - (ready - began), 2),
        "snapshots": sums["snapshots"],
        "meanwhile": asked.report(),
        "rss_mb": rss_mb(bench.processes["p0"].pid),
    }
    progress(f"start: {report}")
    return report


async def base(bench: ScaleBench, requester: Requester, seconds: float) -> dict[str, Any]:
    meter, before = bench.meter(), await bench.tell_fleet(requester)
    await asyncio.sleep(seconds)
    report = {"cores": meter.cores(), "rss_mb": rss_mb(bench.processes["p0"].pid)}
    after = await bench.tell_fleet(requester)
    vault = bench.processes["v0"].pid
    report |= {
        "records_heard_per_worker_s": round(
            (after["records_heard"] - before["records_heard"]) / seconds / bench.workers, 2
        ),
        "vault": {"connections": after["vault_connections"], "threads": threads(vault), "rss_mb": rss_mb(vault)},
    }
    progress(f"{bench.workers} workers, base: {report}")
    return report


async def events(bench: ScaleBench, requester: Requester, seconds: float) -> list[dict[str, Any]]:
    """Growing rates until one is too much."""
    found: list[dict[str, Any]] = []
    for rate in EVENT_RATES:
        before = await bench.tell_fleet(requester, rate=rate)
        began = time.perf_counter()
        meter = bench.meter()
        asked = await requester.paced(ASIDE, seconds)
        cores = meter.cores()
        after = await bench.tell_fleet(requester, rate=0)
        sent = (after["events"] - before["events"]) / (time.perf_counter() - began)
        await asyncio.sleep(1.5)  # two heartbeats: what was lost is noticed, and pulled, by now
        pulled = (await bench.tell_fleet(requester))["snapshots"] - before["snapshots"]
        taken_in = not pulled and asked.report()["unanswered"] == 0 and asked.percentile_ms(99) < PATIENCE_MS
        report = {
            "rate": rate,
            "events_per_s": round(sent),
            "block_operations_per_s": round(sent * OPERATIONS),
            "taken_in": taken_in,
            "snapshots": pulled,
            "p50_ms": asked.percentile_ms(50),
            "p99_ms": asked.percentile_ms(99),
            "cores": cores,
        }
        progress(f"{bench.workers} workers, events: {report}")
        found.append(report)
        if pulled or asked.report()["unanswered"]:
            break  # more of it would only be waited out
    return found


def us_per_event(several: list[dict[str, Any]]) -> float:
    """What one event more costs placement, from the lowest rate to the highest that was taken in."""
    counted = [one for one in several if one["taken_in"]] or several
    first, last = counted[0], counted[-1]
    more = last["events_per_s"] - first["events_per_s"]
    return round((last["cores"]["p0"] - first["cores"]["p0"]) / more * 1e6, 1) if more else 0.0


async def decisions(bench: ScaleBench, requester: Requester, seconds: float) -> dict[str, Any]:
    meter = bench.meter()
    asked = await requester.saturated(AT_ONCE, seconds)
    cores = meter.cores()
    us = round(cores["p0"] / asked.rate * 1e6)
    report = asked.report() | {"cores": cores, "cpu_us_per_request": us, "workers_chosen": len(asked.workers)}
    progress(f"{bench.workers} workers, decisions: {report}")
    return report


async def grown(bench: ScaleBench, requester: Requester, replicas: int = 1) -> bool:
    """Whether every replica hears of the last event of every worker. Raises SystemExit if not."""
    await bench.tell_fleet(requester, grow=True)
    await bench.until_known(requester, WHOLE, some(bench.workers), replicas)
    return True


async def fleet(
    workers: int, blocks: int, room: tuple[int, int] | None, seconds: float, *, fresh: bool
) -> dict[str, Any]:
    """All parts with one replica."""
    async with scale_bench(workers, blocks) as bench:
        await bench.start_fleet()
        requester = await Requester.open(bench.url)
        found: dict[str, Any] = {}
        if fresh:
            found["start"] = await start(bench, requester)
        else:
            began = bench.start_placement("p0", room=room)
            await bench.until_ready(requester)
            found["complete_s"] = round(await bench.until_known(requester, HALF, some(workers)) - began, 2)
        await requester.paced(ASIDE, 2.0)
        found["base"] = await base(bench, requester, seconds)
        paced = await requester.paced(500.0, seconds)
        found["paced_500"] = paced.report()
        progress(f"{workers} workers, 500 requests/s: {found['paced_500']}")
        found["decisions"] = await decisions(bench, requester, seconds)
        found["events"] = await events(bench, requester, seconds)
        found["us_per_event_more"] = us_per_event(found["events"])
        found["last_events_known"] = await grown(bench, requester)
        await requester.close()
        return found


async def as_it_comes(workers: int, blocks: int) -> dict[str, Any]:
    """How many workers of a large fleet the index of a plain placement follows."""
    async with scale_bench(workers, blocks) as bench:
        await bench.start_fleet()
        requester = await Requester.open(bench.url)
        bench.start_placement("p0")
        await bench.until_ready(requester)
        await asyncio.sleep(5.0)
        known = [(await requester.blocks_known(worker))[1] == HALF for worker in range(workers)]
        await requester.close()
        faults = bench.faults("p0")
    report = {"workers": workers, "workers_in_the_index": sum(known), "last_fault": faults[-1:], "faults": len(faults)}
    progress(f"as it comes: {report}")
    return report


def index_mb() -> dict[str, dict[str, int]]:
    """Of an index of a million blocks, by the workers it has room for; three tiers. Of blocks that few hold, where one
    in fourteen is held by many, and where all are."""
    found = {}
    for workers in (64, 256, 1_000, 10_000):
        index = KvIndexer(1_000_000, workers).index
        shares = {"few": 0.0, "a 14th by many": 1 / 14, "all by many": 1.0}
        found[str(workers)] = {
            held: round((index.nbytes + share * 1_000_000 * index.bytes_if_hot) / 1e6) for held, share in shares.items()
        }
    return found


def ring_s() -> dict[str, float]:
    """To build the ring anew, as every replica and every client does when somebody joins or leaves."""
    found = {}
    for workers in (64, 1_000, 10_000):
        names = [f"w-{number:05}" for number in range(workers)]
        HashRing(names)  # points are kept, so the first time says nothing of the next
        began = time.perf_counter()
        HashRing(names)
        found[str(workers)] = round(time.perf_counter() - began, 3)
    return found


async def replicas(count: int, seconds: float) -> dict[str, Any]:
    async with scale_bench(64, 16_384) as bench:
        await bench.start_fleet()
        requester = await Requester.open(bench.url)
        for number in range(count):
            bench.start_placement(f"p{number}")
        await bench.until_ready(requester, count)
        await bench.until_known(requester, HALF, some(64), count)
        await requester.paced(ASIDE, 1.0)
        await bench.tell_fleet(requester, rate=REPLICA_EVENTS)
        meter = bench.meter()
        asked = await requester.paced(REPLICA_RATE, seconds)
        cores = meter.cores()
        await bench.tell_fleet(requester, rate=0)
        known = await grown(bench, requester, count)
        full = await requester.saturated(AT_ONCE, seconds)
        await requester.close()
    report = {
        "replicas": count,
        "paced": asked.report(),
        "answered_by": dict(sorted(asked.by_replica.items())),
        "cores": cores,
        "all_know_all_last_events": known,
        "decisions_per_s": round(full.rate),
    }
    progress(f"replicas: {report}")
    return report


def main() -> None:
    quick = parse_quick(__doc__)
    seconds = 4.0 if quick else 15.0
    small = uvloop.run(fleet(64, 16_384, None, seconds, fresh=True))
    large = uvloop.run(fleet(1_000, 1_000, (1_024, 1_100_000), seconds, fresh=False))
    plain = uvloop.run(as_it_comes(1_000, 1_000))
    several = [uvloop.run(replicas(count, seconds)) for count in (1, 2, 4)]
    value = small["start"]["complete_s"]
    taken_in = [
        max((one["events_per_s"] for one in each["events"] if one["taken_in"]), default=0) for each in (small, large)
    ]
    finish(
        "placement_scale",
        value,
        "s from a fresh placement's start until it knows 64 workers of 16,384 blocks",
        floor=FLOOR_S,
        ok=value <= FLOOR_S and small["start"]["meanwhile"]["refused"] == 0 and all(taken_in),
        events_per_s_taken_in={"64": taken_in[0], "1000": taken_in[1]},
        workers_64=small,
        workers_1000=large,
        as_it_comes=plain,
        replicas=several,
        index_mb_by_workers=index_mb(),
        ring_s_by_workers=ring_s(),
    )


if __name__ == "__main__":
    main()
