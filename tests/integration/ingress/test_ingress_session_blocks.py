"""Where a session's blocks are, and what is left of them when it is deleted: real workers with a host tier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ingress_rig import Served, serve, until

from kvproto.client import Generation
from kvproto.messages import Sampling
from kvproto.subjects import Subjects
from services.ingress.api_keys import hash_key
from services.worker.engine import Engine
from services.worker.tiers.reuse import ReuseWatch
from tests.support.fake_fleet import FakeFleet, FakeWorker

KEYS = "".join(f'[[keys]]\nsha256 = "{hash_key(name)}"\ntenant = "{name}"\npolicies = ["direct"]\n' for name in "ab")
SHARED = "Now is the winter of our discontent made glorious summer by this sun of York. " * 4
ROMEO = "But soft, what light through yonder window breaks? It is the east. " * 3
ALAS = "Alas, poor Yorick! I knew him, Horatio: a fellow of infinite jest. " * 3


@dataclass
class Rig:
    """Two workers, whose blocks all go down to the host, and an ingress of two tenants."""

    workers: list[FakeWorker]
    served: Served

    async def turn(self, prompt: str, seq_id: str, tenant: str = "a", worker: str = "w0") -> int:
        """One turn at one worker. Returns how many of its tokens were cached."""
        body = {"prompt": prompt, "seq_id": seq_id, "temperature": 0, "max_tokens": 8, "worker": worker}
        answer = await self.served.http.post("/generate", json=body, headers=_key(tenant))
        assert answer.status_code == 200, answer.text
        start, *_, done = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert done["type"] == "done"
        assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == start["cached_tokens"]
        cached: int = start["cached_tokens"]
        return cached

    async def about(self, seq_id: str, tenant: str = "a") -> dict[str, Any]:
        answer = await self.served.http.get(f"/sessions/{seq_id}", headers=_key(tenant))
        assert answer.status_code == 200, answer.text
        about: dict[str, Any] = answer.json()
        return about

    async def delete(self, seq_id: str, tenant: str = "a") -> None:
        answer = await self.served.http.delete(f"/sessions/{seq_id}", headers=_key(tenant))
        assert answer.json() == {"seq_id": seq_id, "deleted": True}

    async def ids(self, seq_id: str, tenant: str = "a") -> tuple[int, ...]:
        return (await self.served.ingress.sessions.read(tenant, seq_id)).ids

    async def settled(self) -> None:
        """Nothing goes down to the host any more."""
        for worker in self.workers:
            async with asyncio.timeout(5):
                while await worker.thread.call(_is_offloading):
                    await asyncio.sleep(0.005)

    async def blocks(self, worker: int = 0) -> tuple[int, int]:
        """On device and host."""
        return await self.workers[worker].thread.call(_blocks)


def _key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


def _is_offloading(engine: Engine) -> bool:
    assert engine.tiers is not None
    assert engine.tiers.offloader is not None
    return engine.tiers.offloader.has_work


def _blocks(engine: Engine) -> tuple[int, int]:
    assert engine.tiers is not None
    assert engine.tiers.host is not None
    return engine.pool.cached, engine.tiers.host.pool.cached


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture
async def rig(
    nats_url: str, fleet_buckets: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    monkeypatch.setattr(ReuseWatch, "is_worth", lambda *_: True)
    prefixes = tmp_path / "prefixes.json"
    prefixes.write_text(json.dumps(["<|bos|>" + SHARED]))
    fleet = FakeFleet(nats_url, fleet_buckets)
    workers = [await fleet.start(name, public_prefixes_file=prefixes) for name in ("w0", "w1")]
    served = await serve(nats_url, fleet_buckets, keys=KEYS)
    await until(lambda: len(list(served.client.members.view.ready())) == 2)
    yield Rig(workers, served)
    await served.stop()
    await fleet.stop()


async def test_what_another_session_shares_stays(rig: Rig) -> None:
    assert await rig.turn(ALAS + SHARED, "kept") == 0
    shared = await rig.turn(ALAS + ROMEO, "gone")
    kept, gone = await rig.ids("kept"), await rig.ids("gone")
    assert shared == common(kept, gone) > 32
    await rig.settled()
    await rig.delete("gone")
    await rig.settled()
    assert await rig.turn(ALAS + ROMEO, "anew") == shared
    assert await rig.turn(" and on", "kept") == len(kept) - 1, "all but the last token, which was never fed"


async def test_every_worker_and_every_tier_forgets(rig: Rig) -> None:
    for name in ("w0", "w1"):
        await rig.turn(ROMEO, f"s-{name}", worker=name)
    ids = await rig.ids("s-w0")
    ask = Generation("demo", Sampling(1, temperature=0.0), ids, tenant="a", worker="w1")  # it moved there and back
    async with rig.served.client.generate(ask) as stream:
        async for _ in stream:
            pass
    await rig.settled()
    about = await rig.about("s-w0")
    blocks = len(ids) // 16
    assert about["workers"] == {
        "w0": {"device": len(ids) - 1, "host": len(ids) - 1},
        "w1": {"device": len(ids), "host": len(ids)},
    }
    assert (about["worker_id"], about["cached_tokens"], about["tokens"]) == ("w0", len(ids) - 1, len(ids))
    assert min(*(await rig.blocks(0)), *(await rig.blocks(1))) >= blocks - 1
    await rig.delete("s-w0")
    await rig.delete("s-w1")
    assert [await rig.blocks(0), await rig.blocks(1)] == [(0, 0), (0, 0)]
    assert await rig.turn(ROMEO, "anew") == 0


async def test_what_is_going_down_is_erased_too(rig: Rig) -> None:
    """At once after a turn: its blocks are being copied to the host, or wait for that."""
    for n in range(10):
        assert await rig.turn(ROMEO * 2, f"s{n}") == 0
        await rig.delete(f"s{n}")
        async with asyncio.timeout(5):
            while await rig.blocks() != (0, 0):
                await asyncio.sleep(0.001)


async def test_a_public_prefix_is_nobodys(rig: Rig) -> None:
    await rig.turn(SHARED + ALAS, "mine", tenant="a")
    ids = await rig.ids("mine")
    (prefix,) = rig.workers[0].loop.record.public_prefixes
    assert 32 <= prefix.tokens < len(ids)
    await rig.settled()
    await rig.delete("mine")
    await rig.settled()
    public = prefix.tokens // 16
    assert await rig.blocks() == (public, public)
    assert await rig.turn(SHARED + ROMEO, "yours", tenant="b") == prefix.tokens


async def test_another_tenants_equal_session_stays(rig: Rig) -> None:
    for tenant in "ab":
        assert await rig.turn(ROMEO, "same", tenant=tenant) == 0
    await rig.settled()
    await rig.delete("same", tenant="a")
    ids = await rig.ids("same", tenant="b")
    assert (await rig.about("same", tenant="b"))["cached_tokens"] == len(ids) - 1
    assert await rig.turn(ROMEO, "again", tenant="a") == 0


async def test_a_worker_that_was_killed_holds_nothing_up(rig: Rig) -> None:
    await rig.turn(ROMEO, "s", worker="w1")
    await rig.turn(" and on", "s", worker="w0")
    await rig.settled()
    await rig.workers[1].kill()
    async with asyncio.timeout(3):
        about = await rig.about("s")
        assert list(about["workers"]) == ["w0"]
        await rig.delete("s")
    assert await rig.turn(ROMEO, "anew") == 0
