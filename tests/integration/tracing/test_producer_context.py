"""A Python producer's own trace context: in the headers of what its client asks placement and workers, nowhere else."""

from __future__ import annotations

import asyncio

import pytest

from kvproto import codec
from kvproto.client import Client
from kvproto.connection import Connection, Message
from kvproto.messages import GenerateRequest, Sampling
from kvproto.streams.generation import Generation
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("given", "carried"), [(CONTEXT, CONTEXT), (CONTEXT[:-1] + "0", None), ("garbage", None), (None, None)]
)
async def test_what_a_client_sends(
    fleet: FakeFleet, client: Client, nats_url: str, fleet_buckets: Subjects, given: str | None, carried: str | None
) -> None:
    await fleet.start("w0")
    heard: dict[str, Message] = {}
    listener = await Connection.open(nats_url, name="listener", inbox_prefix="_x.listener")

    async def on_message(message: Message) -> None:
        heard[message.subject] = message

    place, work = fleet_buckets.place("public", "demo"), fleet_buckets.worker_generate("w0", "public")
    await listener.subscribe(f"{fleet_buckets.namespace}.>", on_message)  # placement is never there: the ring places
    await listener.synced()
    async with asyncio.timeout(LIMIT_S):
        while not list(client.members.view.ready("demo")):
            await asyncio.sleep(0.01)
        generation = Generation("demo", Sampling(3), prompt_ids=(1, 2, 3), traceparent=given)
        async with client.generate(generation) as stream:
            async for _ in stream:
                pass
    await listener.close()
    for subject in (place, work):
        assert (heard[subject].headers or {}).get("traceparent") == carried, subject
    assert codec.decode(GenerateRequest, heard[work].data).traceparent == carried
    frames = [message for subject, message in heard.items() if subject not in (place, work)]
    assert not any("traceparent" in (message.headers or {}) for message in frames)
