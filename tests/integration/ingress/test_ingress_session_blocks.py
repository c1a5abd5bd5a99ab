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

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.runs import transcript as strays
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.tiers.offloader import ReuseWatch
from kvproto.client import Generation
from kvproto.messages import Sampling
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S

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

    async def cut_turn(self, prompt: str, seq_id: str, after: int, worker: str = "w0") -> None:
        """A turn whose client closes its connection after so many events; its session is free again."""
        body = {"prompt": prompt, "seq_id": seq_id, "temperature": 0, "max_tokens": 300, "worker": worker}
        async with self.served.http.stream("POST", "/generate", json=body, headers=_key("a")) as answer:
            lines = (line async for line in answer.aiter_lines() if line.startswith("data: "))
            for _ in range(after):
                event = json.loads((await anext(lines))[6:])
                assert event["type"] in ("start", "token"), event
        async with asyncio.timeout(LIMIT_S):
            while (await self.served.ingress.sessions.read("a", seq_id)).head.turn is not None:  # type: ignore[union-attr]
                await asyncio.sleep(0.005)

    async def chat(self, text: str, **fields: Any) -> int:
        """Returns how many tokens of the prompt were cached."""
        messages = [{"role": "user", "content": text}]
        body = {"model": "demo", "messages": messages, "max_tokens": 40, "worker": "w0", **fields}
        answer = await self.served.http.post("/v1/chat/completions", json=body, headers=_key("a"))
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
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
            async with asyncio.timeout(LIMIT_S):
                while await worker.thread.call(_is_offloading):
                    await asyncio.sleep(0.005)

    async def blocks(self, worker: int = 0) -> tuple[int, int]:
        """On device and host."""
        return await self.workers[worker].thread.call(_blocks)


def _key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


def _is_offloading(engine: Engine) -> bool:
    assert engine.tiers is not None
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
    pace = {"fake_tokens_per_s": 400.0}  # a stream lasts long enough to be cut
    workers = [await fleet.start(name, public_prefixes_file=prefixes, **pace) for name in ("w0", "w1")]
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
        async with asyncio.timeout(LIMIT_S):
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


@pytest.mark.parametrize("after", [1, 2, 18, 41])
async def test_a_turn_that_was_cut_goes_with_its_session(rig: Rig, after: int) -> None:
    await rig.turn(ROMEO, "s")
    await rig.cut_turn(ALAS, "s", after)
    await rig.settled()
    assert min(await rig.blocks()) > 0
    await rig.delete("s")
    await rig.settled()
    assert await rig.blocks() == (0, 0)
    assert await rig.turn(ROMEO + ALAS, "anew") == 0


async def test_so_does_what_the_turns_after_it_computed_anywhere(rig: Rig) -> None:
    """Cut at one worker and at another, and the conversation goes on."""
    await rig.turn(ROMEO, "s")
    await rig.cut_turn(ALAS, "s", 30, worker="w1")
    await rig.cut_turn(ALAS + "Where be your gibes now?", "s", 20, worker="w0")
    await rig.turn(" and on", "s", worker="w1")
    await rig.cut_turn(" and on", "s", 2, worker="w1")
    await rig.settled()
    assert min(*(await rig.blocks(0)), *(await rig.blocks(1))) > 0
    await rig.delete("s")
    await rig.settled()
    assert [await rig.blocks(0), await rig.blocks(1)] == [(0, 0), (0, 0)]


async def test_a_first_turn_that_was_cut_can_be_deleted(rig: Rig) -> None:
    await rig.cut_turn(ROMEO, "s", 30)
    await rig.settled()
    assert min(await rig.blocks()) > 0
    assert (await rig.served.http.get("/sessions/s", headers=_key("a"))).status_code == 404
    await rig.delete("s")
    await rig.settled()
    assert await rig.blocks() == (0, 0)
    assert (await rig.served.http.delete("/sessions/s", headers=_key("a"))).status_code == 404


async def test_a_cut_turn_behind_a_public_prefix(rig: Rig) -> None:
    await rig.turn(SHARED + ALAS, "s")
    await rig.cut_turn(ROMEO, "s", 30)
    (prefix,) = rig.workers[0].loop.record.public_prefixes
    await rig.settled()
    await rig.delete("s")
    await rig.settled()
    assert await rig.blocks() == (prefix.tokens // 16, prefix.tokens // 16)


async def test_what_the_session_went_on_with_is_no_stray(rig: Rig) -> None:
    """Of a turn that was cut, and asked for again: what it has in common with the second try."""
    await rig.turn(ROMEO, "s")
    before = await rig.ids("s")
    await rig.cut_turn(ALAS, "s", 20)
    cut = await rig.served.ingress.sessions.read("a", "s")
    assert cut.head is not None
    await rig.turn(ALAS, "s")
    whole = await rig.served.ingress.sessions.read("a", "s")
    assert whole.head is not None
    assert whole.head.strays == cut.head.strays - (len(whole.ids) - len(before)) > 0


async def test_further_choices_go_with_their_session(rig: Rig) -> None:
    await rig.chat(ROMEO, n=3, seq_id="s", seed=1)
    await rig.settled()
    assert await rig.chat(ROMEO, max_tokens=1) > 48
    await rig.settled()
    await rig.delete("s")
    await rig.settled()
    assert await rig.blocks() == (0, 0)


async def test_a_history_that_was_replaced_goes_with_its_session(rig: Rig) -> None:
    await rig.chat(ROMEO, seq_id="s", temperature=0)
    await rig.chat(ALAS, seq_id="s", temperature=0)
    await rig.settled()
    await rig.delete("s")
    await rig.settled()
    assert await rig.blocks() == (0, 0)


async def test_what_is_too_much_to_remember_is_erased_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strays, "MAX_IDS", 150)
    await rig.turn(ROMEO, "s")
    kept = await rig.ids("s")
    for text in (ALAS, SHARED, ALAS[5:], SHARED[5:]):
        await rig.cut_turn(text, "s", 20)
    session = await rig.served.ingress.sessions.read("a", "s")
    assert session.head is not None
    assert 0 < session.head.strays <= 150
    await rig.settled()
    async with asyncio.timeout(LIMIT_S):
        while (await rig.blocks())[0] > (len(kept) + session.head.strays) // 16 + 3:
            await asyncio.sleep(0.005)
    await rig.delete("s")
    await rig.settled()
    assert await rig.blocks() == (0, 0)
