"""Three times as many requests as the fleet can serve: what does it still get done in time?

    python -m benchmarks.overload [--quick]

Two workers (fake runners, each 150 tokens/s, 8 slots), a placement and a nats-server, all real processes. Bare
producers ask for 20 tokens after prompts of 64 that nobody has seen. Capacity is what completes with more asked for
than fits; then requests arrive as a Poisson process at once and at three times that rate, in turn, and do not wait for
one another. Placement lets in what it expects to begin within a second. Whoever is refused comes back once, when it was
told to.

Goodput counts the requests per second that complete with their first token within 2 s and their last within 6 s of
being asked for, whether they came for the first time or came back. The value is goodput at 3x over goodput at 1x, the
median of the rounds.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgpack
import nats

from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.ingress.token_fan_in import Processes, running
from kvproto.subjects import Subjects
from kvservice import launch

NAME, UNIT = "overload", "goodput at 3x capacity over goodput at capacity"
FLOOR = 0.9
WORKERS, SLOTS, TOKENS_PER_S = 2, 8, 150.0
PROMPT, OUT = 64, 20
MAX_WAIT_S = 1.0
TTFT_S, WHOLE_S = 2.0, 6.0
WARM_S = 2.0  # of each part, not counted
INBOX = "_prd.public.bench"


@dataclass(slots=True)
class Asked:
    """One request. `again`: it was refused before, and has come back when it was told to."""

    at: float
    again: bool = False
    first_at: float | None = None
    ended_at: float | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def is_good(self) -> bool:
        if self.code is not None or self.first_at is None or self.ended_at is None:
            return False
        return self.first_at - self.at <= TTFT_S and self.ended_at - self.at <= WHOLE_S


class Producers:
    """All of them on one connection, each request with an inbox of its own."""

    def __init__(self, nc: Any) -> None:
        self.asked: dict[str, Asked] = {}
        self.wrong: list[str] = []  # what must not happen; nats-py swallows what a callback raises
        self._nc = nc
        self._subject = Subjects().generate("public", "demo")
        self._chance = random.Random(5)
        self._coming: set[asyncio.Task[None]] = set()
        self._ends = asyncio.Event()

    @classmethod
    async def open(cls, url: str) -> Producers:
        nc = await nats.connect(url, inbox_prefix=INBOX.encode(), pending_size=64 * 1024 * 1024)
        made = cls(nc)
        await nc.subscribe(f"{INBOX}.*", cb=made._on_frame)
        return made

    async def ask(self, *, again: bool = False) -> str:
        name = f"b{len(self.asked)}"
        self.asked[name] = Asked(_now(), again)
        prompt = [self._chance.randrange(1, 200) for _ in range(PROMPT)]
        body = {"prompt_ids": prompt, "max_tokens": OUT, "temperature": 0.0, "ignore_eos": True}
        await self._nc.publish(self._subject, msgpack.packb(body), reply=f"{INBOX}.{name}")
        return name

    async def _on_frame(self, message: Any) -> None:
        try:
            self._take(message.subject.rsplit(".", 1)[-1], message.data)
        except Exception as error:  # noqa: BLE001 - a callback's top: nats-py would only log it
            self.wrong.append(f"{message.subject}: {error!r}")

    def _take(self, name: str, data: bytes) -> None:
        one = self.asked[name]
        frame: dict[str, Any] = msgpack.unpackb(data) if data else {"type": "failed", "code": "nobody_listens"}
        if frame["type"] == "tokens" and one.first_at is None:
            one.first_at = _now()
        if frame["type"] in ("finished", "failed"):
            if one.ended_at is not None:
                self.wrong.append(f"two terminal frames: {one.code or 'finished'}, {frame.get('code') or 'finished'}")
                return
            one.ended_at, one.code = _now(), frame.get("code")
            one.retry_after_s = frame.get("retry_after_s")
            self._ends.set()

    async def keep(self, count: int, seconds: float) -> float:
        """So many at any time. Returns what completes per second once that has settled."""
        begin = _now()
        running: set[str] = set()
        while _now() < begin + seconds:
            running = {name for name in running if self.asked[name].ended_at is None}
            for _ in range(count - len(running)):
                running.add(await self.ask())
            self._ends.clear()
            await asyncio.wait_for(self._ends.wait(), WHOLE_S)
        good = [one for one in self.asked.values() if one.ended_at is not None and one.code is None]
        done = sum(begin + seconds / 2 <= one.ended_at < begin + seconds for one in good if one.ended_at is not None)
        await self.settle()
        return done / (seconds / 2)

    async def arrive(self, rate: float, seconds: float) -> list[Asked]:
        """A Poisson process. Returns all that were asked for when the last one has ended."""
        before = len(self.asked)
        due = begin = _now()
        while (due := due + self._chance.expovariate(rate)) < begin + seconds:
            await asyncio.sleep(due - _now())
            task = asyncio.create_task(self._come())
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)
        await asyncio.gather(*self._coming)
        await self.settle()
        return list(self.asked.values())[before:]

    async def _come(self) -> None:
        one = self.asked[await self.ask()]
        while one.ended_at is None:
            await asyncio.sleep(0.05)
        if one.retry_after_s is not None:
            await asyncio.sleep(max(one.ended_at + one.retry_after_s * (1 + self._chance.random() / 10) - _now(), 0))
            await self.ask(again=True)

    async def settle(self) -> None:
        until = _now() + 2 * WHOLE_S
        while any(one.ended_at is None for one in self.asked.values()):
            assert _now() < until, "a request has no end"
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._nc.close()


def _now() -> float:
    return asyncio.get_running_loop().time()


def start_fleet(processes: Processes) -> None:
    common = [f"--nats-url={processes.url}", "--log-level=warning"]
    placement = ["kvfleet.placement.main", "--id=p0", f"--max-wait-s={MAX_WAIT_S}"]
    workers = [
        ["kvfleet.worker.main", f"--id=w{number}", "--model=demo", "--runner=fake", f"--slots={SLOTS}",
         f"--fake-tokens-per-s={TOKENS_PER_S}"]
        for number in range(WORKERS)
    ]  # fmt: skip
    for module, *flags in (placement, *workers):
        processes.add(subprocess.Popen(launch.command(module, *flags, *common), text=True))


def figures(asked: list[Asked], seconds: float) -> dict[str, Any]:
    """Of one part. Times of first tokens are those of what was let in."""
    begin = min(one.at for one in asked)
    counted = [one for one in asked if one.ended_at is not None and WARM_S <= one.ended_at - begin < seconds]
    ttfts = sorted(one.first_at - one.at for one in asked if one.first_at is not None)
    first = [one for one in asked if not one.again]
    refused = [one for one in first if one.code is not None]
    again = [one for one in asked if one.again]
    return {
        "asked": len(first),
        "goodput": round(sum(one.is_good for one in counted) / (seconds - WARM_S), 2),
        "refused_share": round(len(refused) / len(first), 3),
        "told_when_to_retry_share": round(
            sum(one.retry_after_s is not None for one in refused) / max(len(refused), 1), 3
        ),
        "admitted_when_obeyed_share": round(sum(one.code is None for one in again) / len(again), 3) if again else None,
        "retry_after_s": spread(one.retry_after_s or 0.0 for one in refused) if refused else None,
        "p99_ttft_s": round(ttfts[int(len(ttfts) * 0.99)], 3),
        "codes": sorted({one.code for one in refused if one.code is not None}),
    }


async def measure(url: str, rounds: int, seconds: float) -> tuple[float, list[list[dict[str, Any]]], list[str]]:
    """The capacity, the figures of each part, and what went wrong."""
    producers = await Producers.open(url)
    try:
        name = ""
        for _ in range(120):  # until somebody serves
            name = await producers.ask()
            await producers.settle()
            if producers.asked[name].code is None:
                break
            await asyncio.sleep(0.5)
        assert producers.asked[name].code is None, producers.asked[name].code
        await asyncio.sleep(2.0)  # all workers are there
        capacity = await producers.keep(WORKERS * SLOTS + WORKERS * 4, seconds)
        progress(f"capacity {capacity:.1f} requests/s")
        parts: list[list[dict[str, Any]]] = [[], []]
        for _ in range(rounds):
            for part, times in zip(parts, (1, 3), strict=True):
                part.append(figures(await producers.arrive(times * capacity, seconds), seconds))
                progress(f"{times}x: {part[-1]}")
        return capacity, parts, producers.wrong
    finally:
        await producers.close()


def main() -> None:
    rounds, seconds = (2, 8.0) if parse_quick(__doc__) else (5, 15.0)
    with running() as processes:
        start_fleet(processes)
        capacity, (once, thrice), wrong = asyncio.run(measure(processes.url, rounds, seconds))
    ratios = [high["goodput"] / low["goodput"] for low, high in zip(once, thrice, strict=True)]
    value = median(ratios)
    told = min(part["told_when_to_retry_share"] for part in thrice)
    finish(
        NAME,
        round(value, 3),
        UNIT,
        floor=FLOOR,
        ok=value >= FLOOR and told == 1.0 and not wrong,
        wrong=wrong[:10],
        capacity_per_s=round(capacity, 2),
        slo={"ttft_s": TTFT_S, "whole_s": WHOLE_S, "max_wait_s": MAX_WAIT_S},
        ratios=[round(ratio, 3) for ratio in ratios],
        goodput_1x=spread(part["goodput"] for part in once),
        goodput_3x=spread(part["goodput"] for part in thrice),
        refused_share_1x=spread(part["refused_share"] for part in once),
        refused_share_3x=spread(part["refused_share"] for part in thrice),
        told_when_to_retry_share=told,
        admitted_when_obeyed_share=spread(part["admitted_when_obeyed_share"] or 0.0 for part in thrice),
        p99_ttft_s_1x=spread(part["p99_ttft_s"] for part in once),
        p99_ttft_s_3x=spread(part["p99_ttft_s"] for part in thrice),
    )


if __name__ == "__main__":
    main()
