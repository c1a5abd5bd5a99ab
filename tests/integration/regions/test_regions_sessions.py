"""Sessions whose turns ran in another region: what is said of them at home, and that their end reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvfleet.ingress.sessions import session_blocks
from kvfleet.worker.engine.engine import Engine
from kvproto.client import Client, Generation
from kvproto.messages import Sampling
from kvproto.regions import qualify
from tests.integration.ingress.ingress_rig import Served, serve
from tests.integration.regions.conftest import TwoRegions
from tests.support.waiting import LIMIT_S, until

PROMPT = "But soft, what light through yonder window breaks? It is the east. " * 3
Open = Callable[[], Awaitable[Served]]


@pytest.fixture
async def opened(regions: TwoRegions) -> AsyncIterator[Open]:
    """An ingress of us, once its placement and it have heard of eu's workers."""
    made: list[Served] = []

    async def open_one() -> Served:
        us = regions.us
        await until(lambda: us.placement.core.region_summaries.regions.ready("demo", us.placement.now()))
        made.append(await serve(us.url, us.subjects, no_worker_timeout_s=5.0))
        expected = sorted(qualify("eu", worker) for worker in regions.eu.fleet.workers)
        await until(lambda: made[0].ingress.regions.workers("eu", "demo") == expected)
        return made[0]

    yield open_one
    for one in made:
        await one.stop()


async def turn(served: Served, prompt: str, seq_id: str = "s") -> None:
    body = {"prompt": prompt, "seq_id": seq_id, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    answer = await served.http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert '"type":"done"' in answer.text


async def blocks(worker: Any) -> int:
    def count(engine: Engine) -> int:
        return engine.pool.cached

    held: int = await worker.thread.call(count)
    return held


async def gone(*workers: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while any([await blocks(worker) for worker in workers]):
            await asyncio.sleep(0.02)


async def test_what_is_said_of_a_session_whose_last_turn_ran_elsewhere(regions: TwoRegions, opened: Open) -> None:
    there = await regions.eu.worker("w0")
    served = await opened()
    await turn(served, PROMPT)
    await regions.us.worker("w0")  # of the same name, and with nothing of it
    await until(lambda: served.client.members.view.is_alive("w0"))
    route = (await served.http.get("/kv/route/s")).json()
    assert route == {"worker_id": "eu.w0", "address": None, "region": "eu"}
    about = (await served.http.get("/sessions/s")).json()
    assert about["tokens"] > 8
    assert (about["worker_id"], about["address"], about["region"]) == (None, None, "eu")
    assert (about["cached_tokens"], about["blocks"]) == (0, [])
    kv = await served.http.get("/sessions/s/kv?layer=0")
    assert (kv.status_code, kv.json()["error"]["code"]) == (404, "not_found")
    assert "eu.w0" in kv.json()["error"]["message"]
    await turn(served, " and on")
    await until(lambda: served.ingress.sessions.running == 0)
    route = (await served.http.get("/kv/route/s")).json()
    assert (route["worker_id"], route["region"]) == ("w0", None)
    await there.stop()


async def test_a_region_that_is_gone_is_not_where_a_session_goes(regions: TwoRegions, opened: Open) -> None:
    await regions.eu.worker("w7")
    served = await opened()
    await turn(served, PROMPT)
    await regions.us.worker("w0")
    await until(lambda: served.client.members.view.is_alive("w0"))
    regions.link.cut()
    await until(lambda: not served.ingress.regions.records())
    assert (await served.http.get("/kv/route/s")).json()["worker_id"] == "w0"
    about = (await served.http.get("/sessions/s")).json()
    assert (about["worker_id"], about["region"], about["cached_tokens"]) == ("w0", None, 0)


async def test_its_end_reaches_all_workers_of_regions_where_it_ran(regions: TwoRegions, opened: Open) -> None:
    first = await regions.eu.worker("w7")
    served = await opened()
    await turn(served, PROMPT)
    second = await regions.eu.worker("w8")
    await until(lambda: len(served.ingress.regions.workers("eu", "demo")) == 2)
    ids = (await served.ingress.sessions.read("public", "s")).ids
    other = await regions.eu.client()
    await until(lambda: len(list(other.members.view.ready())) == 2)
    await copy_to(other, "w8", ids)
    assert await blocks(first)
    assert await blocks(second)
    home = await regions.us.worker("w0")  # where its last turn runs: eu is remembered all the same
    await until(lambda: served.client.members.view.is_alive("w0"))
    await turn(served, " and on")
    head = (await served.ingress.sessions.read("public", "s")).head
    assert head is not None
    assert (head.worker, head.regions) == ("w0", ("eu",))
    assert (await served.http.delete("/sessions/s")).status_code == 200
    await gone(first, second, home)


async def test_a_region_that_is_away_for_a_moment_is_told_later(
    regions: TwoRegions, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_blocks, "BACKGROUND_RETRY_S", 0.2)
    worker = await regions.eu.worker("w7")
    served = await opened()
    await turn(served, PROMPT)
    assert await blocks(worker)
    regions.link.cut()
    await until(lambda: not served.ingress.regions.records())
    assert (await served.http.delete("/sessions/s")).status_code == 200
    regions.link.mend()
    await gone(worker)


async def test_so_is_what_a_deleted_response_left_there(regions: TwoRegions, opened: Open) -> None:
    worker = await regions.eu.worker("w7")
    served = await opened()
    made = await served.http.post("/v1/responses", json={"model": "demo", "input": PROMPT, "max_output_tokens": 16})
    assert made.status_code == 200, made.text
    assert await blocks(worker)
    assert (await served.http.delete(f"/v1/responses/{made.json()['id']}")).status_code == 200
    await gone(worker)


async def copy_to(client: Client, worker: str, ids: tuple[int, ...]) -> None:
    """Have one worker compute a history too, as a stream that moved there would have."""

    ask = Generation("demo", Sampling(1, temperature=0.0), ids, worker=worker, policy="direct")
    async with client.generate(ask) as stream:
        async for _ in stream:
            pass
