"""Workers pull from one another by the data plane: whom placement names, and that what is hot spreads and lapses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_build import MODEL, a_generate, a_record
from placement_rig import BLOCK_BYTES, RATE, Rig, tokens

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Forward, WorkerLeft, WorkerRegistered
from kvproto.messages import Placement, State, Tier

RESTORE = {"peer": 2e9}
PULL_S = BLOCK_BYTES / 2e9  # a block, that is computed in 2 ms


def a_rig(*workers: str, **about: object) -> Rig:
    rig = Rig()
    rig.join_tiered(*workers, **({"restore": RESTORE} | about))  # type: ignore[arg-type]
    return rig


def busy(rig: Rig, worker: str, queued: int = 16_000, rate: float = RATE) -> None:
    rig.beat(worker, queued=queued, running=5, rate=rate)


def test_the_worker_that_holds_most_is_named_and_what_it_has() -> None:
    rig = a_rig("w0", "w1", "w2", "w3")
    ids = tokens(1, 1600)
    rig.store("w0", ids[:800])
    rig.store("w1", ids[:160])
    rig.store("w2", ids[:800])
    rig.store("w2", ids, tier=Tier.HOST, blocks=slice(50, 75))
    busy(rig, "w0")
    busy(rig, "w2")
    placed = rig.place("r", ids)
    assert placed.worker == "w1", "idle, and nearest to having it"
    assert placed.expected_hit == {"device": 160, "peer": 1040}
    assert (placed.source, placed.source_tokens) == ("w2", 1200)
    assert placed.expected_ttft_s == pytest.approx(65 * PULL_S + 400 / RATE)
    assert rig.core.decider.sourced_total == 1
    (decision,) = rig.core.ledger.explain("r")
    assert (decision.source, decision.source_tokens) == ("w2", 1200)
    matched = {one.worker: one.matched for one in decision.candidates}
    assert matched["w3"] == {"peer": 1200}
    assert matched["w2"] == {"device": 800, "host": 400}


def test_who_holds_more_in_another_format_is_not_named() -> None:
    rig = a_rig("w0", "w1", "w2")
    rig.join_tiered("x0", restore=RESTORE, kv_format=b"g" * 16)
    ids = tokens(1, 1600)
    rig.store("w0", ids[:800])
    rig.store("x0", ids)
    for worker in ("w0", "x0"):
        busy(rig, worker, queued=32_000)
    placed = rig.place("r", ids)
    assert placed.worker in ("w1", "w2")
    assert (placed.source, placed.source_tokens, placed.expected_hit) == ("w0", 800, {"peer": 800})


def test_of_equals_the_least_loaded_is_named() -> None:
    rig = a_rig("w0", "w1", "w2")
    ids = tokens(1, 1600)
    for worker in ("w0", "w1"):
        rig.store(worker, ids)
    rig.beat("w0", queued=16_000, running=9)
    rig.beat("w1", queued=16_000, running=5)
    assert rig.place("r", ids).source == "w1"


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("another format", ""),
        ("no data plane", ""),
        ("another model revision", ""),
        ("slow", ""),
        ("never measured", "w0"),  # how else would it ever be
        ("draining", "w0"),
        ("left", ""),
        ("excluded", ""),
    ],
)
def test_who_can_give(how: str, source: str) -> None:
    ids = tokens(1, 1600)
    rig = Rig()
    rig.join_tiered("w0", restore=RESTORE)
    about: dict[str, object] = {
        "another format": {"kv_format": b"g" * 16},
        "no data plane": {"data_plane": ()},
        "another model revision": {"model_revision": "r2"},
    }.get(how, {})
    speeds = {"slow": {"peer": 1e6}, "never measured": {"host": 1e9}}.get(how, RESTORE)
    rig.join_tiered("w1", restore=speeds, **about)  # type: ignore[arg-type]
    rig.store("w0", ids)
    rig.beat("w0", queued=32_000, running=5, state=State.DRAINING if how == "draining" else State.READY)
    if how == "left":
        rig.tell(WorkerLeft("w0"))
    placed = rig.place("r", ids, excluded=("w0",) if how == "excluded" else ())
    assert (placed.worker, placed.source) == ("w1", source)
    pulls = source and how != "never measured"
    assert placed.expected_hit == ({"peer": 1599} if pulls else {})
    rig.core.check_integrity()


def test_what_a_record_says_once_the_model_is_loaded_counts_from_then_on() -> None:
    ids = tokens(1, 1600)
    rig = Rig()
    loading: dict[str, object] = {"block_bytes": 0, "kv_format": b"", "data_plane": ()}
    rig.join_tiered("w0", "w1", restore=RESTORE, **loading)
    rig.store("w0", ids)
    busy(rig, "w0", queued=32_000)
    assert rig.place("r1", ids).expected_hit == {}
    rig.core.inflight.break_off(("public", "r1"))
    for worker in ("w0", "w1"):
        loaded = replace(
            a_record(worker), block_bytes=BLOCK_BYTES, kv_format=b"f" * 16, data_plane=("unix:/somewhere",)
        )
        rig.tell(WorkerRegistered(loaded))
    placed = rig.place("r2", ids)
    assert (placed.worker, placed.source, placed.expected_hit) == ("w1", "w0", {"peer": 1599})


def test_what_nobody_needs_to_pull_names_nobody() -> None:
    rig = a_rig("w0", "w1")
    ids = tokens(1, 1600)
    assert rig.place("cold", ids).source == ""
    for worker in ("w0", "w1"):
        rig.store(worker, ids)
    placed = rig.place("r", ids)
    assert (placed.source, placed.source_tokens, placed.expected_hit) == ("", 0, {"device": 1599})
    assert rig.core.decider.sourced_total == 0


def test_a_worker_that_is_not_believed_is_not_named_before_one_that_is() -> None:
    rig = a_rig("w0", "w1", "w2")
    ids = tokens(1, 1600)
    rig.store("w0", ids)
    rig.store("w1", ids[:800])
    for worker in ("w0", "w1"):
        busy(rig, worker)
    rig.core.workloads.trust(rig.core.fleet.workers["w0"].column, 0.2)
    placed = rig.place("r", ids)
    assert (placed.worker, placed.source, placed.source_tokens) == ("w2", "w1", 800)
    assert placed.expected_hit == {"peer": 800}


def test_a_policy_that_does_not_reckon_says_where_blocks_come_from_all_the_same() -> None:
    rig = a_rig("w0", "w1")
    ids = tokens(1, 1600)
    rig.store("w0", ids)
    placed = rig.place("r", ids, policy="direct", worker="w1")
    assert (placed.source, placed.expected_hit) == ("w0", {"peer": 1599})


def test_a_bare_producers_worker_is_told_too() -> None:
    rig = a_rig("w0", "w1")
    ids = tokens(1, 1600)
    rig.store("w0", ids)
    busy(rig, "w0", queued=32_000)
    (forward,) = [one for one in _generate(rig.core, ids, rig.now) if isinstance(one, Forward)]
    assert (forward.worker, forward.request.source, forward.request.source_tokens) == ("w1", "w0", 1600)


def _generate(core: PlacementCore, ids: tuple[int, ...], now: float) -> list[object]:
    return list(core.handle(a_generate("r", token=MODEL, prompt=None, prompt_ids=ids), now))


# ---------------------------------------------------------------------------------------------- copies


def holders(rig: Rig, ids: tuple[int, ...]) -> set[str]:
    names = tuple(rig.core.fleet.workers)
    depths = rig.core.indexer.depths(rig.hashes(ids), names)[0].tolist()
    return {name for name, depth in zip(names, depths, strict=True) if depth}


def test_a_prefix_in_demand_is_pulled_by_more_workers_and_nothing_renews_its_copies() -> None:
    """A worker's queue grows: further ones pull the prefix instead of computing it. When nobody asks any more, other
    work makes the copies the oldest that a cache has; nothing places it anew."""
    rig = a_rig("w0", "w1", "w2", "w3", rate=2000.0)
    prefix = tokens(1, 8000)
    queued = dict.fromkeys(rig.core.fleet.workers, 0.0)
    pulled: list[Placement] = []
    for number in range(80):  # 400 new tokens each 50 ms: four times what one worker does
        placed = rig.place(f"r{number}", (*prefix, *tokens(100 + number, 400)))
        if placed.source:
            pulled.append(placed)
            assert placed.source in holders(rig, prefix)
            assert placed.expected_hit["peer"] >= 7984
        queued[placed.worker] += 8400 - sum(placed.expected_hit.values())
        rig.finish(placed, (*prefix, *tokens(100 + number, 400)))
        rig.wait(0.05)
        for worker in queued:
            queued[worker] = max(0.0, queued[worker] - 0.05 * 2000)
            rig.beat(worker, queued=int(queued[worker]), rate=2000.0, running=int(queued[worker] > 0))
    assert holders(rig, prefix) == {"w0", "w1", "w2", "w3"}
    assert 3 <= len(pulled) <= 8, "each of them once, give or take what crossed"
    fed = sum(8400 - sum(one.expected_hit.values()) for one in pulled)
    assert fed <= 500 * len(pulled), "copies are pulled and not computed"
    for worker in list(queued)[1:]:  # their caches need the room
        rig.store(worker, prefix, removed=True)
        rig.beat(worker, rate=2000.0)
    keeps = holders(rig, prefix)
    rig.now += 3600
    for worker in queued:
        rig.beat(worker, rate=2000.0)
    for number in range(40):
        rig.finish(rig.place(f"other{number}", tokens(900 + number, 1600)), tokens(900 + number, 1600))
        rig.wait(1.0)
    assert holders(rig, prefix) == keeps == {"w0"}, "nothing was renewed"
    for worker in queued:
        rig.beat(worker, rate=2000.0)
    assert rig.place("late", (*prefix, *tokens(5, 16))).worker == "w0", "one is enough for one who asks"
