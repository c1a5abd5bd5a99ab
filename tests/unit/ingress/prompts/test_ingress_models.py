"""Bundles: fetched once per hash, from whoever has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from ingress_build import demo_bundle

from kvfleet.ingress.fleet.report import IngressCounts, models_report, stats_report, workers_report
from kvfleet.ingress.prompts.models import KEPT_UNNAMED, Models, OtherRegions
from kvproto.errors import InvalidRequest, ModelNotFound, NoWorkers, Unavailable, WorkerLost
from kvproto.fleet_view import FleetView
from kvproto.messages import Adapter, Bundle, Heartbeat, Rates, State, WorkerRecord
from kvproto.subjects import Subjects

COUNTS = IngressCounts("i0", *[0] * 9)


class Source:
    """Workers that hand their bundle over, but for those that are lost."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.lost: set[str] = set()
        self.missed: list[str] = []
        self.known: set[str] = set()  # to placement

    async def bundle(self, worker: str) -> Bundle:
        self.asked.append(worker)
        await asyncio.sleep(0)
        if worker in self.lost:
            raise WorkerLost(f"{worker} is gone")
        return demo_bundle()

    async def miss(self, model: str) -> None:
        self.missed.append(model)
        if model in self.known:
            raise NoWorkers(f"no worker of {model!r} is ready", retry_after_s=2.0)


def models_of(source: Source, view: FleetView, executor: ThreadPoolExecutor) -> Models:
    """Of a fleet of one region."""
    return Models(source, view, executor, OtherRegions(None, Subjects("kvf"), lambda: 0.0))  # type: ignore[arg-type]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def record(worker: str, model: str = "m", bundle: str = "h1", state: State = State.READY) -> WorkerRecord:
    return WorkerRecord(worker, "e", "l", state, model, f"tcp://{worker}", "host", 1, (1, 1), bundle)


def view_of(*records: WorkerRecord) -> FleetView:
    view = FleetView()
    for one in records:
        view.on_worker_record(one, 1, 0.0)
    return view


async def test_a_bundle_is_fetched_once_for_all_who_wait(executor: ThreadPoolExecutor) -> None:
    source, view = Source(), view_of(record("a"), record("b"))
    models = models_of(source, view, executor)
    assert not models.is_ready()
    served = await asyncio.gather(*(models.get("m") for _ in range(5)))
    assert len({id(one) for one in served}) == 1
    assert source.asked == ["a"]
    assert models.is_ready()
    assert served[0].fingerprint == "fp_h1"


async def test_the_next_holder_is_asked_when_one_is_lost(executor: ThreadPoolExecutor) -> None:
    source, view = Source(), view_of(record("a"), record("b"), record("c", bundle="h2"))
    source.lost = {"a"}
    models = models_of(source, view, executor)
    await models.get("m")
    assert source.asked == ["a", "b"]
    source.lost = {"a", "b"}
    with pytest.raises(Unavailable, match="no worker hands over"):
        await models_of(source, view, executor).get("m")


async def test_a_new_hash_is_a_new_bundle_before_its_first_request(executor: ThreadPoolExecutor) -> None:
    source, view = Source(), view_of(record("a"))
    models = models_of(source, view, executor)
    models.start()
    await models.get("m")
    for n in range(2, KEPT_UNNAMED + 5):
        newer = replace(record("a"), bundle=f"h{n}", epoch=f"e{n}")
        change = view.on_worker_record(newer, n, 0.0)
        models.on_member(change, view.workers["a"])
        assert (await models.get("m")).hash == f"h{n}"
    assert len(source.asked) == KEPT_UNNAMED + 4
    assert len(models.bundles) == KEPT_UNNAMED + 1
    await models.stop()


async def test_an_adapter_has_its_models_tokenizer_and_a_name_of_its_own(executor: ThreadPoolExecutor) -> None:
    source = Source()
    view = view_of(record("a"), replace(record("b"), adapters=(Adapter("red", "r1"),)))
    models = models_of(source, view, executor)
    red, base = await models.get("red"), await models.get("m")
    assert (red.name, base.name, source.asked) == ("red", "m", ["b"])
    assert (red.tokenizer, red.bundle) == (base.tokenizer, base.bundle)
    listed = {one.id: (one.parent, one.max_model_len) for one in models_report(models.served()).data}
    assert listed == {"m": (None, 0), "red": ("m", 0)}
    assert models.default_name() == "m"
    assert models.known("red") == "red"
    assert workers_report(view, str)["b"].adapters == ["red"]
    assert stats_report(view, COUNTS).models == ["m", "red"]
    view.on_worker_record(record("b"), 2, 0.0)
    with pytest.raises(ModelNotFound, match="'red'"):
        await models.get("red")
    assert (models.known("red"), models.remembered()) == (None, ["m"])


async def test_models_nobody_serves(executor: ThreadPoolExecutor) -> None:
    view = view_of(record("a"), record("b", "starting", state=State.STARTING))
    models = models_of(Source(), view, executor)
    with pytest.raises(ModelNotFound) as error:
        await models.get("other", field="model_name")
    assert error.value.field == "model_name"
    with pytest.raises(NoWorkers):
        await models.get("starting")


def test_the_model_of_a_request_that_names_none(executor: ThreadPoolExecutor) -> None:
    view = FleetView()
    models = models_of(Source(), view, executor)
    with pytest.raises(NoWorkers):
        models.default_name()
    view.on_worker_record(record("a"), 1, 0.0)
    assert models.default_name() == "m"
    view.on_worker_record(record("b", "n"), 1, 0.0)
    with pytest.raises(InvalidRequest, match="m, n"):
        models.default_name()
    assert list(models.served()) == ["m", "n"]


def test_reports_of_an_empty_and_of_a_mixed_fleet() -> None:
    assert stats_report(FleetView(), COUNTS).hit_rate == 0.0
    assert workers_report(FleetView(), str) == {}
    view = view_of(record("a"), record("b"))
    view.on_worker_gone("b", 1.0, expired=False)
    assert {worker: one.state for worker, one in workers_report(view, str).items()} == {"a": "ready", "b": "dead"}
    stats = stats_report(view, COUNTS)
    assert (stats.workers, stats.ready, stats.load["running"]) == (1, 1, 0)
    assert models_report(view.models()).data[0].id == "m"


def test_rates_are_summed_and_those_by_tier_for_each_tier() -> None:
    assert stats_report(FleetView(), COUNTS).rates["restore_bytes_per_s"] == {}
    view = view_of(record("a"), record("b"), record("c"))
    for worker, rates in (
        ("a", Rates(10.0, 2.0, 4.0, {"host": 3.0, "vault": 1.0})),
        ("b", Rates(5.0, 1.0, 1.0, step_s=0.25)),
    ):
        view.on_heartbeat(Heartbeat(worker, "e", State.READY, rates=rates), 1.0)
    view.on_heartbeat(Heartbeat("c", "e", State.READY, rates=Rates(restore_bytes_per_s={"host": 4.0}, step_s=0.5)), 1.0)
    assert stats_report(view, COUNTS).rates == {
        "prefill_tokens_per_s": 15.0,
        "decode_steps_per_s": 3.0,
        "decode_tokens_per_s": 5.0,
        "restore_bytes_per_s": {"host": 7.0, "vault": 1.0},
        "step_s": 0.5,
    }


async def test_a_model_without_workers_is_told_to_placement_which_may_know_it(executor: ThreadPoolExecutor) -> None:
    """That is how a model that was scaled to nothing comes back: the ingress has no tokenizer to place with."""
    source = Source()
    source.known = {"configured"}
    models = models_of(source, view_of(), executor)
    with pytest.raises(NoWorkers) as refused:
        await models.get("configured")
    assert refused.value.retry_after_s == 2.0
    with pytest.raises(ModelNotFound):
        await models.get("invented")
    assert source.missed == ["configured", "invented"]
