"""100 running streams through an outage of NATS: what they lose, and what is computed again for it.

    python -m benchmarks.nats_outage [--quick]

Real processes: two fake workers at 10 tokens/s a stream, a placement, a client. The server is killed for 10 s (--quick:
6 s, longer than a record lives) in the midst of all streams and started again on the same port and store. The same
streams with other prompts run without an outage first; the workers must have fed their models equally many tokens.
Value: tokens computed again.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from benchmarks.harness.live_fleet import Fleet, Seen, one_server, prompt, read_with_client
from benchmarks.harness.report import finish, parse_quick, progress, spread
from kvproto.client import Client
from kvproto.testing.nats_process import NatsProcess

STREAMS, WORKERS, PACE = 100, 2, 10


def fed(client: Client) -> int:
    """Tokens that the models of all workers were run on, by their heartbeats."""
    beats = [view.heartbeat for view in client.members.view.workers.values()]
    return sum(beat.load.fed_tokens_total for beat in beats if beat is not None)


async def run(client: Client, first: int, tokens: int, server: NatsProcess | None, away_s: float) -> list[Seen]:
    """All streams at once; with a server, it is away in their midst."""
    seen = [Seen(prompt(first + number), tokens) for number in range(STREAMS)]
    reading = [asyncio.create_task(read_with_client(client, one)) for one in seen]
    while not all(len(one.ids) > tokens // 10 for one in seen):
        await asyncio.sleep(0.05)
    if server is not None:
        progress("NATS is killed")
        server.kill()
        await asyncio.sleep(away_s)
        await asyncio.to_thread(server.start)
        progress("NATS is back")
    await asyncio.gather(*reading)
    return seen


async def measure(server: NatsProcess, tokens: int, away_s: float) -> tuple[list[Seen], int, int, float]:
    async with await Client.open(server.url) as client:
        while len(list(client.members.view.ready())) < WORKERS:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        before = fed(client)
        calm = await run(client, 0, tokens, None, 0.0)
        assert all(one.ok for one in calm), [one.error for one in calm if not one.ok][:3]
        await asyncio.sleep(1.5)  # the last heartbeat says it all
        fed_in_calm = fed(client) - before
        progress(f"without an outage: {fed_in_calm} tokens fed")
        began = time.monotonic()
        seen = await run(client, 400, tokens, server, away_s)
        await asyncio.sleep(1.5)
        return seen, fed_in_calm, fed(client) - before - fed_in_calm, time.monotonic() - began


def main() -> None:
    quick = parse_quick(__doc__)
    tokens, away_s = (100, 6.0) if quick else (200, 10.0)
    with one_server() as (server, folder):
        fleet = Fleet(server.url, folder, f"--fake-tokens-per-s={STREAMS * PACE // WORKERS}", "--slots=256")
        fleet.init()
        try:
            fleet.start("placement", "p0")
            for number in range(WORKERS):
                fleet.worker(f"w{number}")
            seen, calm, troubled, seconds = asyncio.run(measure(server, tokens, away_s))
            ended = [name for name, service in fleet.services.items() if service.process.poll() is not None]
        finally:
            fleet.stop()
    broken = [one for one in seen if not one.ok]
    gaps = [max(after - before for before, after in pairwise(one.times)) for one in seen if len(one.times) > 1]
    attempts = max(one.attempts for one in seen)
    again = troubled - calm
    progress(f"{len(broken)} broken of {STREAMS}, {again} tokens computed again: {broken[:1]}"[:600])
    finish(
        "nats_outage",
        again,
        f"tokens computed again for an outage of {away_s:.0f} s",
        floor=0,
        ok=not broken and again == 0 and attempts == 1 and not ended,
        streams=STREAMS,
        completed=STREAMS - len(broken),
        most_attempts=attempts,
        fed_tokens=troubled,
        fed_tokens_without_outage=calm,
        longest_gap_s=spread(gaps),
        seconds=round(seconds, 1),
        processes_ended=ended,
    )


if __name__ == "__main__":
    main()
