"""A worker for prompts and one for what comes after: real loops, engines, data plane, placement and clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from fake_fleet import BareProducer, StartPlacement

from kvfleet.placement.producers import in_flight
from kvfleet.worker.streams.records import AttemptRecord, Reader, Track
from kvproto.buckets import Bucket
from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.dataplane.keys import ensure_key
from kvproto.messages import Encoding, GenerateRequest, Sampling, Started, Tokens
from tests.chaos import mutations
from tests.chaos.asking import BareProducer as Producer
from tests.chaos.behaviour import PLAIN
from tests.chaos.cases import Case
from tests.chaos.checker import check
from tests.chaos.history import Exchange, History, Transport
from tests.chaos.load import answer_of
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.unfailed import unfailed
from tests.support.waiting import LIMIT_S, until

LONG = tuple(7 + at * 13 % 900 for at in range(4000))
BLOCK = 16
OUTPUT = 40
STREAMS = 4
ENDS_WITHIN_S = 10.0  # else it is lost


@pytest.fixture(autouse=True)
def _offers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a busy machine that answers late must not be passed over."""
    monkeypatch.setattr(in_flight, "ACKNOWLEDGE_S", in_flight.MOST_S)


@pytest.fixture
async def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k")


@pytest_asyncio.fixture
async def busy(
    fleet: FakeFleet, client: Client, start_placement: StartPlacement, sockets: Path
) -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    """A prefill worker, and a decode worker with streams."""
    await ensure_key(await Bucket.open(client.connection, client.subjects.keys_bucket))
    placement = await start_placement("cost")
    pace = {"fake_tokens_per_s": 400, "fake_prefill_tokens_per_s": 5000, "step_tokens": 512, "blocks": 4096}
    decodes = await fleet.start("d", sockets, role="decode", **pace)
    prefills = await fleet.start("p", sockets, role="prefill", **pace)
    await until(lambda: len(placement.core.fleet.ready("demo").workers) == 2)
    sampling = Sampling(3000, temperature=0.0, ignore_eos=True)
    streams = [
        asyncio.create_task(read(client, Generation("demo", sampling, (number, *range(100, 140)), worker="d")))
        for number in range(STREAMS)
    ]
    await until(lambda: placement.core.fleet.workers["d"].load.running == STREAMS)
    yield prefills, decodes
    for one in streams:
        one.cancel()
        with suppress(asyncio.CancelledError):
            await one


async def read(client: Client, generation: Generation) -> tuple[list[int], list[Started]]:
    ids: list[int] = []
    starts: list[Started] = []
    async with client.generate(generation) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
            elif isinstance(event, Started):
                starts.append(event)
        starts.append(stream.assembly.started or starts[-1])
    return ids, starts


async def test_a_long_prompt_is_prefilled_there_and_goes_on_here_with_its_blocks(
    client: Client, busy: tuple[FakeWorker, FakeWorker]
) -> None:
    prefills, decodes = busy
    sampling = Sampling(OUTPUT, temperature=0.0, ignore_eos=True)
    ids, starts = await read(client, Generation("demo", sampling, LONG))
    assert ids == unfailed(LONG, OUTPUT)
    assert prefills.loop.hand_over.moved_total == 1
    assert starts[-1].worker == "d"
    assert decodes.loop.requests.ahead.blocks_total >= len(LONG) // BLOCK // 2  # while prefill went on
    assert starts[-1].recomputed_tokens <= 2 * BLOCK
    prompts_fed = decodes.thread.engine.load().fed_tokens_total - decodes.thread.engine.load().generated_tokens_total
    assert prompts_fed < len(LONG) // 4


async def test_a_short_prompt_stays_where_it_decodes(client: Client, busy: tuple[FakeWorker, FakeWorker]) -> None:
    prefills, _ = busy
    sampling = Sampling(OUTPUT, temperature=0.0, ignore_eos=True)
    ids, starts = await read(client, Generation("demo", sampling, LONG[:40]))
    assert ids == unfailed(LONG[:40], OUTPUT)
    assert starts[-1].worker == "d"
    assert prefills.loop.requests.requests_total == 0


async def test_results_that_come_at_once_make_one_hand_over(
    busy: tuple[FakeWorker, FakeWorker], client: Client
) -> None:
    prefills, _ = busy
    record = AttemptRecord(
        "r", 0, [Reader("_INBOX.r", Encoding.FRAMES)], [], [Track()], {0}, "public",
        GenerateRequest("r", 0, "demo", Sampling(9), "_INBOX.r", LONG, then="d"), b"", 0.0,
    )  # fmt: skip
    assert not prefills.loop.hand_over.claims(record), "it has no token yet"
    record.has_spoken = True
    assert [prefills.loop.hand_over.claims(record) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("half", ["p", "d"])
async def test_either_half_may_die(
    client: Client, fleet: FakeFleet, busy: tuple[FakeWorker, FakeWorker], half: str
) -> None:
    prefills, _ = busy
    sampling = Sampling(OUTPUT, temperature=0.0, ignore_eos=True)
    asked = asyncio.create_task(read(client, Generation("demo", sampling, LONG)))
    await until(lambda: prefills.thread.engine.load().running == 1)
    await fleet.workers[half].kill()
    async with asyncio.timeout(LIMIT_S):
        ids, starts = await asked
    assert ids == unfailed(LONG, OUTPUT)
    assert starts[-1].worker == ("d" if half == "p" else "p")


async def test_a_bare_producers_request_goes_the_same_way(
    busy: tuple[FakeWorker, FakeWorker], producer: BareProducer
) -> None:
    prefills, decodes = busy
    asked = {"request": "r1", "prompt_ids": list(LONG), "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0.0}
    frames = await producer.generate(as_json=True, **asked)
    ids = [one for frame in frames if frame["type"] == "tokens" for one in frame["ids"]]
    assert ids == unfailed(LONG, OUTPUT)
    assert frames[-1]["type"] == "finished"
    assert prefills.loop.hand_over.moved_total == 1
    assert decodes.loop.requests.ahead.blocks_total


async def test_a_request_that_nobody_hears_of_is_seen(
    client: Client, busy: tuple[FakeWorker, FakeWorker], nats_url: str
) -> None:
    """As the chaos suite sees it."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    case = Case("long", Transport.BARE_JSON, "demo", "public", OUTPUT, greedy, LONG, limit_s=ENDS_WITHIN_S)
    now = asyncio.get_running_loop().time
    connection = await Connection.open(nats_url, name="chaos", inbox_prefix="_prd.public.chaos")
    asking = Producer(connection, client.subjects, now)

    async def ask(number: int) -> Exchange:
        exchange = Exchange(number, case.transport, case.name, case.model, case.tenant, "plain", now())
        await asking.ask(case, PLAIN, exchange)
        return exchange

    with mutations.without_word_of_hand_overs():
        broken = await ask(0)
    as_it_is = await ask(1)
    await connection.close()
    answers = {(case.name, 0): answer_of(as_it_is, case)}
    assert answers[case.name, 0].ids == (tuple(unfailed(LONG, OUTPUT)),)
    assert not check(History(answers, [as_it_is])).violations
    seen = check(History(answers, [broken])).violations
    assert {one.what for one in seen} == {"lost"}
