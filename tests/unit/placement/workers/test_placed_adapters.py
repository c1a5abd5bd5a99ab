"""Adapters are models of the workers that have them, with blocks of their own; their demand is their model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_build import FLEET_KEY, MODEL, a_beat, a_core, a_generate, a_record, an_ask
from placement_rig import tokens

from kvfleet.placement.advice.questions import preload, survey
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Forward, WorkerLeft, WorkerRegistered
from kvfleet.placement.workers.prompts import SharedPrefix, address_spaces, chain
from kvproto.block_hash import TenantRoots
from kvproto.errors import KvfleetError, ModelNotFound, NotFound, NoWorkers
from kvproto.messages import Adapter, PreloadRequest, Refused, WorkerRecord

RED, BLUE = Adapter("red", "r1"), Adapter("blue", "b1")
PROMPT = tokens(1, 64)


def with_(worker: str, *adapters: Adapter) -> WorkerRecord:
    return replace(a_record(worker), adapters=adapters)


def the_core(*records: WorkerRecord) -> PlacementCore:
    core = a_core(policy="cost")
    for record in records:
        core.handle(WorkerRegistered(record, None), 0.0)
    return core


def placed(core: PlacementCore, model: str, number: int = 0, **fields: object) -> str:
    core.check_integrity()
    return core.decider.decide("public", an_ask(f"r{number}", model=model, **fields), 1.0).worker


def refusal(core: PlacementCore, model: str, **fields: object) -> type[KvfleetError]:
    with pytest.raises(KvfleetError) as refused:
        placed(core, model, **fields)
    return type(refused.value)


def test_an_adapters_requests_go_where_it_is_and_the_models_anywhere() -> None:
    core = the_core(with_("w1"), with_("w2", RED), with_("w3", RED, BLUE))
    assert {placed(core, "red", number) for number in range(20)} == {"w2", "w3"}
    assert {placed(core, "blue", number) for number in range(20, 40)} == {"w3"}
    assert {placed(core, MODEL, number) for number in range(40, 140)} == {"w1", "w2", "w3"}
    assert refusal(core, "green") is ModelNotFound


def test_one_that_lost_its_worker_goes_on_only_where_the_adapter_is() -> None:
    core = the_core(with_("w1"), with_("w2", RED), with_("w3", RED))
    for number in range(10):
        assert placed(core, "red", number, attempt=1, excluded=("w2",)) == "w3"
    core.handle(WorkerLeft("w2"), 2.0)
    core.handle(WorkerLeft("w3"), 2.0)
    assert refusal(core, "red") is NoWorkers  # they may come back


def test_loaded_and_unloaded_while_they_run() -> None:
    core = the_core(with_("w1"), with_("w2"))
    placed(core, MODEL)
    column = core.fleet.workers["w2"].column
    assert refusal(core, "red") is ModelNotFound
    core.handle(WorkerRegistered(with_("w2", RED), None), 1.0)
    assert placed(core, "red") == "w2"
    assert core.fleet.workers["w2"].column == column  # what is known of the worker stays
    core.handle(WorkerRegistered(with_("w2"), None), 2.0)
    assert refusal(core, "red") is ModelNotFound
    core.handle(WorkerRegistered(replace(with_("w2", RED), epoch="e2"), None), 3.0)
    assert placed(core, "red") == "w2"
    core.handle(WorkerRegistered(replace(with_("w2"), epoch="e3"), None), 4.0)  # another life, without it
    assert refusal(core, "red") is ModelNotFound
    assert placed(core, MODEL) in ("w1", "w2")


def test_a_worker_that_is_named_must_have_it() -> None:
    core = the_core(with_("w1"), with_("w2", RED))
    assert placed(core, "red", policy="direct", worker="w2") == "w2"
    assert refusal(core, "red", policy="direct", worker="w1") is NotFound


def test_a_bare_producer_names_it_like_any_model() -> None:
    core = the_core(with_("w1"), with_("w2", RED))
    (forward,) = [one for one in core.handle(a_generate(token="red"), 1.0) if isinstance(one, Forward)]
    assert (forward.worker, forward.request.model) == ("w2", "red")


def test_blocks_are_matched_under_roots_of_their_own() -> None:
    """What a worker holds for the model is not seen by an adapter's requests, nor another revision's."""
    core = the_core(with_("w1", RED), with_("w2", RED), with_("w3", replace(RED, revision="r2")))
    spaces = {one: core.fleet.workers[one].spaces for one in ("w1", "w2", "w3")}
    assert spaces["w1"] == spaces["w2"] == address_spaces(with_("x", RED))
    assert spaces["w3"]["red"] != spaces["w1"]["red"]
    assert spaces["w3"][MODEL] == spaces["w1"][MODEL]
    hashed = {
        name: core.decider.prompts.hashes(space, "public", an_ask(prompt_ids=PROMPT)).tobytes()
        for name, space in {**spaces["w1"], "red 2": spaces["w3"]["red"]}.items()
    }
    assert len(set(hashed.values())) == 3
    theirs = TenantRoots("", 16, (), FLEET_KEY, RED.lora).of("public", PROMPT)
    assert hashed["red"] == chain(theirs, PROMPT, 16).tobytes()  # as the worker has them
    assert len(core.fleet.ready("red").spaces) == 2
    assert len(core.fleet.ready(MODEL).spaces) == 1


def test_refused_requests_of_an_adapter_are_demand_for_its_model() -> None:
    core = the_core(with_("w1", RED))
    core.handle(a_beat("w1"), 1.0)
    core.autoscaler.refuse([Refused("red", 7, 100)], 1.0)
    core.autoscaler.tick(2.0)
    (signals,) = core.autoscaler.signals()
    assert (signals.model, signals.queue_depth) == (MODEL, 7)


def test_the_last_worker_with_an_adapter_is_drained_by_name_only() -> None:
    core = the_core(with_("w1"), with_("w2", RED), with_("w3"))
    *_, costs = survey("", core.decider.heat, core.fleet, core.indexer, 1.0)
    assert sorted(one.worker for one in costs) == ["w1", "w3"]
    *_, costs = survey("red", core.decider.heat, core.fleet, core.indexer, 1.0)
    assert [one.worker for one in costs] == ["w2"]


def test_a_new_worker_is_told_of_prefixes_of_the_adapters_that_it_has() -> None:
    core = the_core(with_("w1", RED, BLUE), with_("w2", RED), with_("w3", replace(RED, revision="r2")))
    space, vault = core.fleet.workers["w1"].spaces, core.indexer.index.add_holder(pooled=True)
    for number, name in enumerate((MODEL, "red", "blue")):
        ids = tokens(number, 64)
        root = core.decider.prompts.root(space[name], "public", an_ask(prompt_ids=ids))
        prefix = SharedPrefix(name, space[name], root, chain(root, ids, 16))
        last = prefix.hashes[-1].tobytes()
        for _ in range(2):
            core.decider.heat.add(last, 1.0)
        core.decider.heat.keep(last, prefix, 1.0)
        core.indexer.index.store(vault, 2, prefix.hashes)

    def told(worker: str) -> set[bytes]:
        ask = PreloadRequest(worker, MODEL, "", 16, 1000)
        *_, chains = preload(ask, core.decider.heat, core.fleet, core.indexer, 10**6, 1.0)
        return {one.root for one in chains}

    def roots(*names: str) -> set[bytes]:
        return {TenantRoots("", 16, (), FLEET_KEY, space[name].lora).of("public", ()) for name in names}  # type: ignore[misc]

    assert told("w1") == roots(MODEL, "red", "blue")
    assert told("w2") == roots(MODEL, "red")
    assert told("w3") == roots(MODEL)
