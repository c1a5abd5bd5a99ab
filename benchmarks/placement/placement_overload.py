"""What one placement does for those who wait 50 ms for its answer when it is asked too much, and after it stood still.

    python -m benchmarks.placement_overload [--quick]

A real placement process, a nats-server, 16 fake workers of 1,024 blocks; this process asks, with prompts of 128 blocks
encoded beforehand and, as Clients do, how long it waits. It is worse than Clients: it goes on asking, answered
or not, and never sends a request to the worker that it is told. An answer is useful within 50 ms of being asked for.

* best: from 200 requests/s, a third more each time, until much fewer get useful answers: the most of these a second;
* overload: three times that rate, paced: useful answers, over the best. That is the value;
* stall: at 2,000 requests/s, or 0.8 of the best where that is less, the process is stopped for a second. It is back
  when of the requests of the next half second 0.9 got useful answers;
* phantoms: what none of these were sent to a worker is booked: seconds until placement has forgotten all of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from bisect import bisect_left
from statistics import median
from typing import Any

import uvloop

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.placement._requester import Asked, Requester
from benchmarks.placement._scale_bench import ScaleBench, scale_bench
from kvfleet.placement.workers.bookings import WORD_S

NAME, UNIT = "placement_overload", "useful answers at 3x what a placement can decide, over the most useful answers"
FLOOR = 0.9
USEFUL_S = 0.05
WORKERS, BLOCKS = 16, 1_024
TIMES = 3.0
FIRST, MORE, STEPS = 200.0, 4 / 3, 16
STALL_S, STALL_RATE, STALL_SHARE = 1.0, 2_000.0, 0.8
BACK_S = 1.0  # at most
WINDOW_S, ENOUGH, TOO_LITTLE = 0.5, 0.9, 0.6
FORGOTTEN_S = USEFUL_S + WORD_S + 0.5  # at most: the requests' time, their workers', and the ticks that look


def useful_rate(asked: Asked) -> float:
    return asked.useful(USEFUL_S) / asked.took_s


async def best_of(requester: Requester, seconds: float) -> float:
    found = []
    for step in range(STEPS):
        rate = FIRST * MORE**step
        asked = await requester.paced(rate, seconds, answers_s=0.5)
        found.append(useful_rate(asked))
        progress(f"{rate:.0f}/s: {found[-1]:.0f} useful/s, {asked.report()}")
        if found[-1] < TOO_LITTLE * rate:
            break
    return max(found)


def back_after(asked: Asked, resumed: float) -> float:
    """Seconds from there to the first half second of requests that were answered as before; infinite: none was."""
    useful = sorted(
        at for at, seconds in zip(asked.sent_at, asked.seconds, strict=True) if seconds <= USEFUL_S and at >= resumed
    )
    every = [at for at in asked.asked_at if at >= resumed]
    for begin in every:
        if begin + WINDOW_S > every[-1]:
            break
        sent = bisect_left(every, begin + WINDOW_S) - bisect_left(every, begin)
        good = bisect_left(useful, begin + WINDOW_S) - bisect_left(useful, begin)
        if good >= ENOUGH * sent:
            return begin - resumed
    return float("inf")


async def stalled(bench: ScaleBench, requester: Requester, rate: float) -> float:
    pid = bench.processes["p0"].pid
    asking = asyncio.create_task(requester.paced(rate, 2.0 + STALL_S + 4.0))
    await asyncio.sleep(2.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STALL_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    resumed = time.perf_counter()
    asked = await asking
    back_s = back_after(asked, resumed)
    progress(f"stopped for {STALL_S} s at {rate:.0f}/s: back after {back_s:.3f} s, {asked.report()}")
    return back_s


async def forgotten(bench: ScaleBench, requester: Requester) -> tuple[int, float]:
    """What is booked right after a burst, and how long until nothing is."""
    await requester.paced(300.0, 0.5, answers_s=0.1)
    began = time.perf_counter()
    most = 0
    while True:
        (stats,) = (await bench.stats(requester)).values()
        most = max(most, stats.booked)
        seconds = time.perf_counter() - began
        if not stats.booked or seconds > 10 * FORGOTTEN_S:
            return most, seconds


async def measure(seconds: float, rounds: int) -> dict[str, Any]:
    async with scale_bench(WORKERS, BLOCKS) as bench:
        await bench.start_fleet()
        requester = await Requester.open(bench.url, tells=False, deadline_s=USEFUL_S)
        bench.start_placement("p0")
        await bench.until_ready(requester)
        await requester.paced(200.0, 2.0)
        best = await best_of(requester, seconds / 2)
        shares, meters = [], []
        for _ in range(rounds):
            meter = bench.meter()
            asked = await requester.paced(TIMES * best, seconds)
            meters.append(meter.cores())
            shares.append(useful_rate(asked) / best)
            progress(f"{TIMES} of {best:.0f}/s: {shares[-1]:.3f} of the best, {asked.report()}, {meters[-1]}")
        rate = min(STALL_RATE, STALL_SHARE * best)
        backs = [await stalled(bench, requester, rate) for _ in range(rounds)]
        booked, forgotten_s = await forgotten(bench, requester)
        progress(f"{booked} booked are forgotten after {forgotten_s:.2f} s")
        await requester.close()
        return {
            "value": round(median(shares), 3),
            "shares": [round(share, 3) for share in shares],
            "best_per_s": round(best),
            "cores": meters[-1],
            "stall": {"rate": round(rate), "back_s": [round(one, 3) for one in backs], "floor_s": BACK_S},
            "phantoms": {"booked": booked, "forgotten_s": round(forgotten_s, 2), "floor_s": FORGOTTEN_S},
        }


def main() -> None:
    seconds, rounds = (3.0, 1) if parse_quick(__doc__) else (8.0, 3)
    found = uvloop.run(measure(seconds, rounds))
    value = found.pop("value")
    ok = (
        value >= FLOOR
        and median(found["stall"]["back_s"]) <= BACK_S
        and found["phantoms"]["forgotten_s"] <= FORGOTTEN_S
    )
    finish(NAME, value, UNIT, floor=FLOOR, ok=ok, **found)


if __name__ == "__main__":
    main()
