"""Autoscaling signals over NATS: series from the start, the same at every replica, and demand that nobody serves."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import pytest
import pytest_asyncio
from fake_fleet import MODEL, FakeWorker, StartWorker

from kvfleet.cli.embedded.autoscaler import ask_all
from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.io.subscriptions import Subscriptions
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.placement_metrics import readings
from kvproto import codec
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.errors import NoWorkers
from kvproto.ids import new_epoch, new_process_id
from kvproto.messages import Load, MemberRecord, ModelSignals, PlacementStats, Rates, Role, State
from kvproto.subjects import PLACEMENT_INBOX, Subjects, inbox_prefix
from kvservice.metrics import Reading
from tests.support.waiting import LIMIT_S, until

RULES = Rules(minimum=0, maximum=8, up_s=1.8, down_s=1.8)
PER_MODEL = (
    "kvfleet_model_queue_depth_requests",
    "kvfleet_model_oldest_wait_seconds",
    "kvfleet_model_saturation_ratio",
    "kvfleet_model_desired_replicas",
    "kvfleet_model_ready_replicas",
)

StartScaler = Callable[..., Awaitable[PlacementLoop]]


@pytest_asyncio.fixture
async def start_scaler(nats_url: str, fleet_buckets: Subjects):  # type: ignore[no-untyped-def]
    started: list[tuple[PlacementLoop, Connection]] = []

    async def start(rules: Rules = RULES, models: tuple[str, ...] = (MODEL,)) -> PlacementLoop:
        member = new_process_id()
        prefix = inbox_prefix(PLACEMENT_INBOX, member)
        connection = await Connection.open(nats_url, name=f"placement-{member}", inbox_prefix=prefix)
        versions = codec.supported_versions()
        record = MemberRecord(member, new_epoch(), "", State.READY, Role.PLACEMENT, "localhost", 1, versions)
        loop = PlacementLoop(
            connection,
            fleet_buckets,
            record,
            PlacementConfig(rules=rules, models=models),
            chance=random.Random(1).random,
            fleet_key=b"k",
        )
        started.append((loop, connection))
        await loop.start()
        return loop

    yield start
    for loop, connection in started:
        await loop.stop(grace_s=0)
        await connection.close()
        assert loop.internal_errors_total == 0


async def signals(requester: Connection, subjects: Subjects) -> ModelSignals:
    reply = await requester.request(subjects.placement_stats(), b"", LIMIT_S)
    return next(one for one in codec.decode(PlacementStats, reply.data).models if one.model == MODEL)


def own(loop: PlacementLoop) -> ModelSignals:
    return next(one for one in loop.core.autoscaler.signals() if one.model == MODEL)


def series(loop: PlacementLoop) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    reading: Reading
    for reading in readings(loop, loop.connection):
        if reading.name in PER_MODEL and reading.read_labelled is not None:
            found[reading.name] = dict(reading.read_labelled())
    return found


async def test_a_configured_model_has_its_series_before_it_has_a_worker(start_scaler: StartScaler) -> None:
    loop = await start_scaler(Rules(minimum=1))
    found = series(loop)
    assert set(found) == set(PER_MODEL)
    assert {name: one[MODEL,] for name, one in found.items()} == dict.fromkeys(PER_MODEL, 0.0) | {
        "kvfleet_model_desired_replicas": 1.0
    }


async def test_a_request_for_a_model_without_workers_is_demand(
    start_scaler: StartScaler, nats_url: str, fleet_buckets: Subjects, requester: Connection
) -> None:
    first, second = await start_scaler(), await start_scaler()
    assert own(first).desired == own(second).desired == 0
    async with await Client.open(nats_url, namespace=fleet_buckets.namespace) as client:
        with pytest.raises(NoWorkers) as refused:
            for _ in range(50):  # whoever waits for placement waits 50 ms, on a busy machine in vain
                await client.miss(MODEL)
        assert refused.value.retry_after_s == 2.0
        await no_miss(client, "nobody-knows-this")
    await until(lambda: own(first).desired == own(second).desired == 1)  # whichever of them was asked
    await until(lambda: own(first).queue_depth == own(second).queue_depth >= 1)
    assert own(first).saturation == 1.0
    said = await signals(requester, fleet_buckets)
    assert (said.desired, said.ready, said.living) == (1, 0, 0)
    assert {one.model for one in first.core.autoscaler.signals()} == {MODEL}


async def no_miss(client: Client, model: str) -> None:
    """Placement has said that nobody serves it. On a busy machine it may not answer, and then whoever knows no worker
    itself cannot say."""
    for _ in range(50):
        with contextlib.suppress(NoWorkers):
            await client.miss(model)
            return
    pytest.fail("no answer")


async def test_what_a_process_that_has_just_started_lacks_is_no_unknown_model(
    start_scaler: StartScaler, start_worker: StartWorker, nats_url: str, fleet_buckets: Subjects
) -> None:
    """All leases ran out as JetStream was away: placement knows the workers, and it does not yet."""
    await start_worker("w0")
    loop = await start_scaler()
    await until(lambda: own(loop).ready == 1)
    async with await Client.open(nats_url, namespace=fleet_buckets.namespace) as client:
        await until(lambda: client.members.view.is_alive("w0"))
        client.members.view.workers.clear()
        with pytest.raises(NoWorkers):
            await client.miss(MODEL)
        await no_miss(client, "nobody-knows-this")


async def test_load_is_measured_alike_by_all_and_answered_by_all(
    start_scaler: StartScaler, start_worker: StartWorker
) -> None:
    worker: FakeWorker = await start_worker("w0")
    replicas = [await start_scaler(), await start_scaler()]
    await until(lambda: all(own(one).ready == 1 for one in replicas))
    assert [own(one).desired for one in replicas] == [1, 1]
    worker.load = Load(waiting=6, running=4, slots=4, queued_prefill_tokens=9000, oldest_wait_s=1.5)
    worker.rates = Rates(1000.0)
    await until(lambda: all(own(one).desired == 2 for one in replicas))
    for one in replicas:
        assert own(one).queue_depth == 6
        assert own(one).oldest_wait_s >= 1.5
        assert own(one).saturation == pytest.approx(4.5, rel=0.2)  # nine seconds of work, and two are the target
    late = await start_scaler()
    assert own(late).desired <= 1  # it has just begun: the largest of all counts


async def test_silence_lowers_nothing(start_scaler: StartScaler, start_worker: StartWorker) -> None:
    workers = [await start_worker(f"w{number}") for number in range(2)]
    for worker in workers:
        worker.load = Load(running=2, slots=4)
    loop = await start_scaler()
    await until(lambda: own(loop).desired == 2)
    for worker in workers:
        await worker.kill()
    await asyncio.sleep(2 * RULES.down_s)  # nothing is scaled down
    assert own(loop).desired == 2


async def test_a_replica_that_begins_says_nothing_before_it_has_looked(
    start_scaler: StartScaler,
    start_worker: StartWorker,
    requester: Connection,
    fleet_buckets: Subjects,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(2):
        await start_worker(f"w{number}")
    heard: list[list[PlacementStats]] = []
    begin = Subscriptions.start

    async def slowly(subscriptions: Subscriptions) -> None:
        heard.append(await ask_all(requester, fleet_buckets, 0.5))
        await begin(subscriptions)
        heard.append(await ask_all(requester, fleet_buckets, 0.5))

    monkeypatch.setattr(Subscriptions, "start", slowly)
    await start_scaler(Rules(minimum=1, maximum=8))
    assert heard == [[], []]
    said = await signals(requester, fleet_buckets)
    assert (said.desired, said.living) == (2, 2)
