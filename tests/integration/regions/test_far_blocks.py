"""A worker named as the source by another region: fetched from over a fast link, computed instead where the link is
measured to be slow, and left alone where nobody who has the fleet's key vouches for its addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.messages import Finished, GenerateRequest, Sampling
from kvproto.regions import seal
from tests.integration.regions.conftest import FLEET_KEY, TwoRegions
from tests.integration.regions.test_regions import ask, ready
from tests.support.slow_proxy import SlowProxy
from tests.support.waiting import LIMIT_S, until

PROMPT = tuple(100 + i % 900 for i in range(2000))
# The prompt is 16 kB: milliseconds of a link here, where a busy machine may stop for a second, and 2 s of a slow one.
COMPUTE_S = {"fast": 5.0, "slow": 0.7, "not vouched for": 0.7}  # at the far worker
SLOW_BYTES_PER_S = 8_000.0
SOURCE = "us.w0"


async def finished(regions: TwoRegions, request: GenerateRequest) -> None:
    """Asks eu's worker, as a client that its placement sent there does."""
    raw = await Connection.open(regions.us.url, name="asks", inbox_prefix="_prd.public.asks")
    ended = asyncio.Event()

    async def hear(message: Message) -> None:
        if any(isinstance(frame, Finished) for frame in codec.decode_frames(message.data)):
            ended.set()

    await raw.subscribe(request.inbox, hear)
    subject = regions.us.subjects.worker_generate("eu.w7", "public")
    await raw.publish(subject, codec.encode(request), reply="_prd.public.asks.accepted")
    async with asyncio.timeout(LIMIT_S):
        await ended.wait()
    await raw.close()


@pytest.mark.parametrize("link", list(COMPUTE_S))
async def test_blocks_cross_where_that_is_quicker(
    regions: TwoRegions, tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfleet.worker.tiers.source.PROBE_BYTES", 4096)  # the fake runner's blocks are as small
    pace = len(PROMPT) / COMPUTE_S[link]
    home = await regions.us.worker("w0", sockets=tmp_path, region="us", blocks=1024)
    far = await regions.eu.worker("w7", sockets=tmp_path, region="eu", blocks=1024, fake_prefill_tokens_per_s=pace)
    client = await regions.us.client()
    await until(lambda: ready(client) == 1)
    assert (await ask(client, PROMPT))[0] == "w0"
    other = await regions.eu.client()
    await until(lambda: ready(other) == 1)
    await ask(other, (7,) * 1200)  # so that it knows how fast it computes
    assert home.network is not None
    assert far.network is not None
    assert far.network.remote is not None
    (address,) = [one for one in home.loop.record.data_plane if one.startswith("tcp:")]
    with SlowProxy(address, bytes_per_s=SLOW_BYTES_PER_S if link == "slow" else None) as proxy:
        addresses = (proxy.address,)
        sealed = seal(b"somebody else's" if link == "not vouched for" else FLEET_KEY.encode(), SOURCE, addresses)
        request = GenerateRequest(
            "r1", 0, "demo", Sampling(max_tokens=4, temperature=0.0, ignore_eos=True), "_prd.public.asks.frames",
            prompt_ids=PROMPT, source=SOURCE, source_tokens=len(PROMPT),
            source_addresses=addresses, source_seal=sealed,
        )  # fmt: skip
        remote = far.network.remote
        if link != "not vouched for":  # as an earlier request does, so that the decision rests on the measurement
            remote.introduce(SOURCE, addresses)
            await until(lambda: remote.speed_of(SOURCE))
        await finished(regions, request)
        fetched = far.thread.measured[0].tiers["peer"].hit_tokens_total
        speed = remote.speed_of(SOURCE)
        if link == "fast":
            assert fetched >= len(PROMPT) - 16
        else:
            assert fetched == 0
        if link == "slow":
            assert speed is not None
            assert speed.bytes_per_s < 10 * SLOW_BYTES_PER_S
        if link == "not vouched for":
            assert (proxy.passed, speed) == (0, None), "nobody connected there"
        await far.stop()  # before the proxy ends
