"""A turn of /generate that ends while JetStream is away: no token is lost, and its end comes when it is kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from ingress_rig import serve

from kvproto.buckets import ensure_buckets
from kvproto.connection import Connection
from kvproto.subjects import Subjects
from kvproto.testing.fixtures import ProcessFactory
from kvproto.testing.nats_process import PLAIN_CONFIG
from tests.support import sse
from tests.support.fake_fleet import FakeFleet

TOKENS = 60


async def test_a_turn_is_kept_once_jetstream_is_back(nats_process: ProcessFactory, tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text(PLAIN_CONFIG)
    server = nats_process(config)
    subjects = Subjects()
    setup = await Connection.open(server.url, name="setup", inbox_prefix="_adm.t")
    await ensure_buckets(setup, subjects)
    await setup.close()
    fleet = FakeFleet(server.url, subjects)
    await fleet.start("w0", fake_tokens_per_s=60)
    served = await serve(server.url, subjects)

    async def come_back() -> None:
        """When all tokens have been generated and their turn has been waiting to be kept."""
        await asyncio.sleep(3.0)
        config.write_text(PLAIN_CONFIG)
        server.restart()

    try:
        body = {"prompt": "O Romeo", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        events: list[dict[str, Any]] = []
        async with served.http.stream("POST", "/generate", json=body) as answer:
            async for line in sse.alines(answer):
                if not line.startswith("data: "):
                    continue
                events.append(json.loads(line[6:]))
                if len(events) == 10:
                    config.write_text(PLAIN_CONFIG.replace("jetstream: enabled", ""))
                    server.restart()
                    coming_back = asyncio.create_task(come_back())
        await coming_back
        assert [event["type"] for event in events] == ["start", *["token"] * TOKENS, "done"]
        session = (await served.http.get(f"/sessions/{events[0]['seq_id']}")).json()
        assert session["tokens"] >= TOKENS
    finally:
        await served.stop()
        await fleet.stop()
