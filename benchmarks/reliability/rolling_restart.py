"""Every process of a fleet restarted one after the other, twice, under load: errors, and what is computed again.

    python -m benchmarks.rolling_restart [--quick]

Real processes: three fake workers, two ingresses, two placements, two vaults, a NATS cluster of three. Clients without
a pause between requests: twelve of `kvproto.Client`, eight of HTTP (each to an ingress whose /readyz says yes, as a
load balancer would), four bare producers of plain NATS. Each process gets SIGTERM, must end with 0, and is started
again once it is gone; the next follows when the fleet is ready (--quick: once through). Every answer is compared with
the model's. Value: the most tokens computed again by any sequence when workers drained.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.harness.live_fleet import (
    Fleet,
    Seen,
    Texts,
    prompt,
    read_over_http,
    read_with_client,
    three_servers,
)
from benchmarks.harness.report import finish, parser, progress
from kvproto import codec
from kvproto.client import Client
from kvproto.connection import Connection, Message
from kvproto.errors import CodecError
from kvproto.ids import new_request_id
from kvproto.messages import Started
from kvproto.testing.nats_cluster import NatsCluster
from kvproto.testing.nats_process import free_port

TOKENS, RATE = 150, 200  # of a request; a second and worker
CLIENTS, HTTP, PRODUCERS = 12, 8, 4
MOST_AGAIN = 16
SILENCE_S = 6.0  # after which a bare producer asks again


@dataclass
class Outcome:
    """What clients saw, by kind of client and by what was being restarted."""

    phase: str = "start"
    stop: bool = False
    complete: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    asked_again: Counter[str] = field(default_factory=Counter)  # by bare producers, as they are told to
    again: dict[str, list[int]] = field(default_factory=dict)  # phase -> tokens computed again by each moved sequence
    failures: Counter[str] = field(default_factory=Counter)  # of restores, all workers
    numbers: int = 0

    def next(self) -> int:
        self.numbers += 1
        return self.numbers

    def judge(self, kind: str, seen: Seen) -> None:
        if seen.ok:
            self.complete[kind] += 1
        else:
            what = seen.error or f"{len(seen.ids)} tokens of {seen.tokens}, or wrong ones"
            self.errors.append(f"{self.phase}: {kind}: {what}")
            progress(self.errors[-1][:300])


async def ask_by_client(client: Client, outcome: Outcome) -> None:
    while not outcome.stop:
        outcome.judge("client", await read_with_client(client, Seen(prompt(outcome.next()), TOKENS)))


async def ask_by_http(ingresses: dict[str, bool], texts: Texts, outcome: Outcome) -> None:
    while not outcome.stop:
        ready = [base for base, is_ready in ingresses.items() if is_ready]
        if not ready:
            await asyncio.sleep(0.05)
            continue
        number = outcome.next()
        text, seen = texts.ask(number, TOKENS)
        await read_over_http(ready[number % len(ready)], seen, text)
        outcome.judge("http", seen)


async def follow_readiness(ingresses: dict[str, bool], outcome: Outcome) -> None:
    """What a load balancer does."""

    def is_ready(base: str) -> bool:
        try:
            with urlopen(f"{base}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    while not outcome.stop:
        for base in ingresses:
            ingresses[base] = await asyncio.to_thread(is_ready, base)
        await asyncio.sleep(0.1)


async def ask_as_producer(connection: Connection, outcome: Outcome) -> None:
    """One NATS request, then frames in JSON; where it is told to, or hears nothing, it asks again."""
    while not outcome.stop:
        seen = Seen(prompt(outcome.next()), TOKENS)
        for _ in range(6):
            if await produce_once(connection, seen):
                break
            outcome.asked_again[outcome.phase] += 1
            progress(f"{outcome.phase}: a producer asks again: {seen.told}")
            seen.ids.clear()
            await asyncio.sleep(0.2)
        outcome.judge("producer", seen)


async def produce_once(connection: Connection, seen: Seen) -> bool:
    """Whether it came to its end, as it should or not; False: ask again."""
    inbox = f"{connection.inbox_prefix}.{new_request_id()}"
    frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    newest = 0

    async def on_frame(message: Message) -> None:
        if message.data:
            frames.put_nowait(json.loads(message.data))
        else:
            frames.put_nowait({"type": "failed", "retryable": True, "message": "no placement"})

    subscription = await connection.subscribe(inbox, on_frame)
    body = {"prompt_ids": seen.prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    try:
        await connection.publish("kvf.generate.public.demo", json.dumps(body).encode(), reply=inbox, headers=headers)
        while True:
            try:
                frame = await asyncio.wait_for(frames.get(), SILENCE_S)
            except TimeoutError:
                seen.told = f"nothing after {len(seen.ids)} tokens"
                return False
            newest, attempt = max(newest, frame.get("attempt", 0)), frame.get("attempt", 0)
            if attempt < newest:
                continue  # of a worker that was too late: another one has it
            if frame["type"] == "tokens":
                if frame["index"] > len(seen.ids):
                    seen.told = f"tokens from {frame['index']} on after {len(seen.ids)}"
                    return False  # some were lost with a server: a bare producer has nobody to ask for them
                seen.take(frame["ids"][len(seen.ids) - frame["index"] :], time.monotonic())
            elif frame["type"] == "finished":
                return True
            elif frame["type"] == "failed":
                seen.told = f"{frame.get('code')}: {frame.get('message')}"
                if frame.get("retryable"):
                    return False
                seen.error = seen.told
                return True
    finally:
        await subscription.unsubscribe()


@asynccontextmanager
async def observed(connection: Connection, outcome: Outcome) -> AsyncIterator[None]:
    """How each continued attempt began, of whichever reader."""

    async def on_frames(message: Message) -> None:
        try:
            frames = codec.decode_frames(message.data)
        except CodecError:
            return
        for frame in frames:
            if isinstance(frame, Started) and frame.attempt:
                outcome.again.setdefault(outcome.phase, []).append(frame.recomputed_tokens)
                if frame.recomputed_tokens > MOST_AGAIN:
                    progress(f"{outcome.phase}: {frame}")

    for inbox in ("_ing.*.b", "_prd.public.*.b"):
        await connection.subscribe(inbox, on_frames)
    await connection.synced()
    yield


def restores_failed(port: int) -> Counter[str]:
    """Of a worker's life: blocks that no restore brought, by tier and reason."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found = re.compile(r'kvfleet_worker_tier_failures_total\{reason="(.*)",tier="(.*)"\} (.*)')
    counted = (match.groups() for match in map(found.match, lines) if match is not None)
    return Counter({f"{tier} {reason}": int(float(count)) for reason, tier, count in counted if float(count)})


async def restart_all(
    fleet: Fleet, cluster: NatsCluster, outcome: Outcome, ports: dict[str, int], metrics: dict[str, int]
) -> dict[str, int]:
    """One after the other; exit codes by name."""
    codes: dict[str, int] = {}
    starters: dict[str, Callable[[str], object]] = {
        "w": lambda name: fleet.worker(name, f"--metrics-port={metrics[name]}"),
        "i": lambda name: fleet.ingress(name, ports[name]),
        "p": lambda name: fleet.start("placement", name),
        "v": lambda name: fleet.start("vault", name),
    }
    for name in sorted(fleet.services, reverse=True):  # workers, vaults, placements, ingresses
        outcome.phase = name
        if name in metrics:
            outcome.failures += await asyncio.to_thread(restores_failed, metrics[name])
        fleet.base = next(f"http://127.0.0.1:{port}" for other, port in ports.items() if other != name)
        codes[name] = await asyncio.to_thread(fleet.services[name].stop)
        starters[name[0]](name)
        await asyncio.to_thread(fleet.wait_ready, 3)
        await asyncio.sleep(1.0)
        progress(f"{name} restarted, exit code {codes[name]}; {dict(outcome.complete)} complete")
    for number, node in enumerate(cluster.nodes):
        outcome.phase = f"nats {number}"
        await asyncio.to_thread(node.stop)
        await asyncio.to_thread(node.start)
        await cluster.ready(["KV_kvf_members", "KV_kvf_sessions"])
        await asyncio.to_thread(fleet.wait_ready, 3)
        await asyncio.sleep(1.0)
        progress(f"nats {number} restarted; {dict(outcome.complete)} complete")
    outcome.phase = "after"
    return codes


async def measure(
    fleet: Fleet, cluster: NatsCluster, ports: dict[str, int], metrics: dict[str, int], rounds: int
) -> tuple[Outcome, list[int]]:
    outcome, texts = Outcome(), Texts()
    ingresses = {f"http://127.0.0.1:{port}": True for port in ports.values()}
    own = await Connection.open(cluster.urls, name="producers", inbox_prefix="_prd.public.bench")
    async with await Client.open(cluster.urls) as client, observed(own, outcome):
        work: list[Awaitable[None]] = [ask_by_client(client, outcome) for _ in range(CLIENTS)]
        work += [ask_by_http(ingresses, texts, outcome) for _ in range(HTTP)]
        work += [ask_as_producer(own, outcome) for _ in range(PRODUCERS)]
        work.append(follow_readiness(ingresses, outcome))
        asking = [asyncio.ensure_future(one) for one in work]
        await asyncio.sleep(3.0)
        codes: list[int] = []
        for number in range(rounds):
            progress(f"round {number + 1}")
            codes += (await restart_all(fleet, cluster, outcome, ports, metrics)).values()
        for port in metrics.values():
            outcome.failures += await asyncio.to_thread(restores_failed, port)
        outcome.stop = True
        await asyncio.gather(*asking)
    await own.close()
    return outcome, codes


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--logs", type=Path, help="folder for the processes' logs")
    options = arguments.parse_args()
    quick = options.quick
    with three_servers() as (cluster, folder):
        asyncio.run(cluster.ready())
        fleet = Fleet(cluster.url, folder, f"--fake-tokens-per-s={RATE}", "--drain-s=8", replicas=3)
        fleet.ingress_flags = ("--drain-s=60", "--unready-s=0.5")
        fleet.init()
        ports = {"i0": fleet.port, "i1": free_port()}
        metrics = {f"w{number}": free_port() for number in range(3)}
        try:
            for number in range(2):
                fleet.start("vault", f"v{number}")
                fleet.start("placement", f"p{number}")
            for name, port in metrics.items():
                fleet.worker(name, f"--metrics-port={port}")
            for name, port in ports.items():
                fleet.ingress(name, port)
            for port in ports.values():
                fleet.base = f"http://127.0.0.1:{port}"
                fleet.wait_ready(3)
            progress("the fleet is ready")
            outcome, codes = asyncio.run(measure(fleet, cluster, ports, metrics, 1 if quick else 2))
        finally:
            fleet.stop()
            if options.logs is not None:
                options.logs.mkdir(parents=True, exist_ok=True)
                for log in folder.glob("*.log"):
                    shutil.copy(log, options.logs)
    drained = [tokens for phase, moved in outcome.again.items() if phase[0] == "w" for tokens in moved]
    others = [tokens for phase, moved in outcome.again.items() if phase[0] != "w" for tokens in moved]
    worst = max(drained, default=0)
    finish(
        "rolling_restart",
        worst,
        "tokens computed again by a sequence whose worker drained, at most",
        floor=MOST_AGAIN,
        ok=not outcome.errors and not any(codes) and bool(drained) and worst <= MOST_AGAIN,
        restarts=len(codes) + (3 if quick else 6),
        errors=len(outcome.errors),
        first_errors=outcome.errors[:3],
        complete=dict(outcome.complete),
        exit_codes=sorted(set(codes)),
        sequences_moved_by_draining=len(drained),
        more_than_16=sum(tokens > MOST_AGAIN for tokens in drained),
        sequences_moved_otherwise=len(others),
        computed_again_otherwise_at_most=max(others, default=0),
        producers_asked_again=dict(outcome.asked_again),
        blocks_not_restored=dict(outcome.failures),
    )


if __name__ == "__main__":
    main()
