"""The policies that reckon: the cost in seconds, and match minus load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_build import a_record, an_ask
from placement_rig import RATE, Rig, tokens

from kvfleet.placement.events import WorkerRegistered
from kvfleet.placement.index.changes import Changes, HolderChange
from kvfleet.placement.policies import DEFAULT_POLICY, Question
from kvfleet.placement.policies.cost import Cost
from kvfleet.placement.policies.simple import KvLoad
from kvfleet.placement.workers.fleet import Fleet, Ready
from kvfleet.placement.workers.price_kernel import COPY, COST, FETCH, HARM, PREFILL, QUEUE, RESTORED, SLOT, STEP
from kvfleet.placement.workers.prompts import NO_HASHES, address_spaces
from kvfleet.placement.workers.workloads import Workloads
from kvproto.hash_ring import HashRing
from kvproto.messages import Load, Rates

BLOCK_BYTES = 1_000_000


def question(
    matched: list[list[float]],
    prompt: int,
    *,
    loads: list[Load] | None = None,
    rates: list[Rates] | None = None,
    heat: float = 0.0,
) -> Question:
    """Over workers w0, w1...: `matched` has a row per tier."""
    fleet = Fleet(Workloads())
    count = len(matched[0])
    for number in range(count):
        record = a_record(f"w{number}")
        fleet.register(record, None, 0.0)
        column = fleet.workers[f"w{number}"].column
        fleet.workloads.drop(column)
        assert fleet.workloads.add(BLOCK_BYTES / 16, 16, 0.0) == column
        load = loads[number] if loads else Load(slots=100)
        fleet.workloads.report(column, load, rates[number] if rates else Rates(RATE), (), 0.0)
    ready: Ready = fleet.ready("demo")
    rows = matched + [matched[-1]] * (4 - len(matched))
    return Question(
        key="key",
        ask=an_ask(),
        ring=HashRing(f"w{number}" for number in range(count)),
        excluded=frozenset(),
        candidates=ready.workers,
        alive=fleet.workers,
        loads=fleet.workloads.view(ready.columns, 0.0),
        prompt_tokens=prompt,
        matched=np.array(rows, dtype=float),
        heat=heat,
        hashes=NO_HASHES,
        depth=0,
    )


def fetch_and_prefill(asked: Question) -> tuple[np.ndarray, np.ndarray]:
    choice = Cost().choose(asked)
    assert choice is not None
    assert choice.prices is not None
    return choice.prices[FETCH], choice.prices[PREFILL]


def test_cost_is_the_default() -> None:
    assert Cost.name == DEFAULT_POLICY


def test_restoring_is_chosen_as_far_as_it_is_quicker_than_computing() -> None:
    host, vault = 100 * 1e6, 1 * 1e6  # a block in 10 ms, in 1 s; it is prefilled in 2 ms... at 8,000 tokens/s
    slow = Rates(800.0, restore_bytes_per_s={"host": host, "vault": vault})  # a block is prefilled in 20 ms
    asked = question([[160, 160], [800, 160], [1600, 1600]], 1616, rates=[slow, slow])
    fetch, prefill = fetch_and_prefill(asked)
    assert fetch.tolist() == pytest.approx([40 * 0.01, 0.0])
    assert prefill.tolist() == pytest.approx([816 / 800, 1456 / 800])


def test_restoring_slower_than_computing_is_not_chosen_and_unmeasured_tiers_are_none() -> None:
    quick = Rates(RATE, restore_bytes_per_s={"host": 1e6})
    asked = question([[160, 160], [800, 800]], 1600, rates=[quick, Rates(RATE)])
    fetch, prefill = fetch_and_prefill(asked)
    assert fetch.tolist() == [0, 0]
    assert prefill.tolist() == [1440 / RATE] * 2


def test_a_tier_that_was_never_measured_is_no_choice_and_bars_no_other() -> None:
    rates = [Rates(800.0, restore_bytes_per_s={"peer": 1e9, "no tier": 5.0}), Rates(800.0)]
    asked = question([[0, 0], [160, 0], [1600, 1600], [3200, 3200]], 3216, rates=rates)
    fetch, prefill = fetch_and_prefill(asked)
    assert fetch.tolist() == pytest.approx([200 * 1e6 / 1e9, 0])
    assert prefill.tolist() == pytest.approx([16 / 800, 3216 / 800])
    assert restored(asked) == [[0, 0, 3200], [0, 0, 0]]


@pytest.mark.parametrize(
    ("vault", "peer", "came_from"),
    [
        (1e9, 5e8, [0, 1600, 1600]),  # vaults first, a peer goes on where they end
        (5e8, 1e9, [0, 0, 3200]),  # the peer is quicker, and has what vaults have too
        (1e9, 1e6, [0, 1600, 0]),  # slower than computing
        (1e6, 0.0, [0, 0, 0]),
    ],
)
def test_vaults_and_a_peer_are_asked_in_the_order_that_is_quicker(
    vault: float, peer: float, came_from: list[float]
) -> None:
    rates = [Rates(800.0, restore_bytes_per_s={"vault": vault, "peer": peer})]
    asked = question([[0], [0], [1600], [3200]], 3216, rates=rates)
    assert restored(asked) == [came_from]
    fetch, prefill = fetch_and_prefill(asked)
    speeds = [vault, vault, peer]
    seconds = sum(tokens / 16 * BLOCK_BYTES / speed for tokens, speed in zip(came_from, speeds, strict=True) if tokens)
    assert fetch.tolist() == pytest.approx([seconds])
    assert prefill.tolist() == pytest.approx([(3216 - sum(came_from)) / 800])


def restored(asked: Question) -> list[list[float]]:
    """By worker: tokens from host, vaults and a peer."""
    choice = Cost().choose(asked)
    assert choice is not None
    assert choice.prices is not None
    found: list[list[float]] = choice.prices[RESTORED:].T.tolist()
    return found


def cheapest_plan(share: list[int], rate: Rates, tokens: int, speed: float) -> tuple[float, float, list[int]]:
    """Every way to stop somewhere: seconds to fetch and to prefill, and tokens by tier."""
    by_tier = [rate.restore_bytes_per_s[name] for name in ("host", "vault", "peer")]
    device, *ends = share
    best = (0.0, (tokens - device) / speed, [0, 0, 0])
    for skips_vaults in (False, True):
        at, fetched, came = device, 0.0, [0, 0, 0]
        for tier, (end, bandwidth) in enumerate(zip(ends, by_tier, strict=True)):
            if not bandwidth or (tier == 1 and skips_vaults):
                continue
            if tier == 2 and skips_vaults and end == ends[1]:
                continue  # no peer has more
            if end > at:
                fetched += (end - at) / 16 * BLOCK_BYTES / bandwidth
                came[tier], at = end - at, end
                plan = (fetched, (tokens - at) / speed, list(came))
                best = min(best, plan, key=lambda one: one[0] + one[1])
    return best


@given(
    data=st.data(),
    count=st.integers(1, 6),
    tokens=st.integers(0, 5000),
    heat=st.floats(0, 100),
)
def test_prices_are_what_the_text_says(data: st.DataObject, count: int, tokens: int, heat: float) -> None:
    """Worker by worker, term by term, in plain numbers."""
    draw = data.draw
    few, big = st.integers(0, 20), st.integers(0, 50_000)
    loads = [
        Load(slots=draw(few), running=draw(few), waiting=draw(few), queued_prefill_tokens=draw(big))
        for _ in range(count)
    ]
    some = st.sampled_from([0.0, 500.0, 8000.0, 9000.0])
    rates = [
        Rates(draw(some), 1.0, draw(some), {name: draw(some) * 1e5 for name in ("host", "vault", "peer")})
        for _ in range(count)
    ]
    shares = [sorted(draw(st.lists(st.integers(0, tokens), min_size=4, max_size=4))) for _ in range(count)]
    matched = [[float(share[tier]) for share in shares] for tier in range(4)]
    asked = question(matched, tokens, loads=loads, rates=rates, heat=heat)
    found = asked.loads.price(asked.matched, tokens, heat=heat, others=4.0, busy=50.0)
    measured = [one.prefill_tokens_per_s for one in rates if one.prefill_tokens_per_s]
    mean = len(measured) / sum(1 / one for one in measured) if measured else 1000.0
    each = min((1 / one.decode_tokens_per_s for one in rates if one.decode_tokens_per_s), default=0.0)
    prefills = []
    for number, (load, rate) in enumerate(zip(loads, rates, strict=True)):
        own = rate.prefill_tokens_per_s
        speed = mean if not own or abs(own - mean) <= 0.25 * mean else own
        requests = load.running + load.waiting
        assert found[QUEUE, number] == pytest.approx(load.queued_prefill_tokens / speed)
        assert found[SLOT, number] == 0  # how long requests stay is not known
        assert found[STEP, number] == pytest.approx(requests * each)
        fetch, prefill, _ = cheapest_plan(shares[number], rate, tokens, speed)
        assert found[FETCH, number] + found[PREFILL, number] == pytest.approx(fetch + prefill)
        came = sum(found[RESTORED:, number])
        assert found[PREFILL, number] == pytest.approx((tokens - shares[number][0] - came) / speed)
        prefills.append(found[PREFILL, number])
    for number, prefill in enumerate(prefills):
        copied = prefill - min(prefills)
        assert found[COPY, number] == pytest.approx(-min(copied, 0.5) * heat / (1 + heat))
        assert found[HARM, number] == pytest.approx(4.0 * (min(prefills) + copied / (1 + heat)))
    assert found[COST] == pytest.approx(found[:COST].sum(axis=0))


def test_a_worker_that_can_restore_is_chosen_before_one_that_must_compute() -> None:
    rates = [Rates(800.0), Rates(800.0, restore_bytes_per_s={"host": 1e9})]
    choice = Cost().choose(question([[0, 0], [0, 1600]], 1616, rates=rates))
    assert choice is not None
    assert choice.worker == "w1"
    assert choice.prices is not None
    assert choice.prices[FETCH].tolist() == pytest.approx([0, 0.1])


def test_rates_are_those_of_each_worker() -> None:
    choice = Cost().choose(question([[0, 0]], 8000, rates=[Rates(1000.0), Rates(9000.0)]))
    assert choice is not None
    assert choice.worker == "w1"


@pytest.mark.parametrize(("heat", "worker"), [(0.0, "w0"), (30.0, "w1")])
def test_a_prefix_in_demand_is_copied_to_an_idle_worker(heat: float, worker: str) -> None:
    loads = [Load(slots=100, queued_prefill_tokens=1600), Load(slots=100)]
    choice = Cost().choose(question([[2000, 0]], 2100, loads=loads, heat=heat))
    assert choice is not None
    assert choice.worker == worker


def test_nobody_waits_long_for_the_sake_of_a_copy() -> None:
    loads = [Load(slots=100, queued_prefill_tokens=8000), Load(slots=100)]
    choice = Cost().choose(question([[80_000, 0]], 80_100, loads=loads, heat=1000.0))
    assert choice is not None
    assert choice.worker == "w0"
    assert choice.prices is not None
    assert choice.prices[COPY].tolist() == pytest.approx([0.0, -0.5], abs=0.001)


def test_of_equals_the_ring_decides() -> None:
    asked = question([[0, 0, 0, 0]], 100)
    choice = Cost().choose(asked)
    assert choice is not None
    assert choice.worker == asked.ring.owner("key")


def test_dynamos_example_is_reproduced() -> None:
    """Matches of 15, 50 and 75 %, loads of 30, 50 and 80 %: the second worker, at 0."""
    loads = [Load(slots=100, running=running) for running in (30, 50, 80)]
    choice = KvLoad().choose(question([[150, 500, 750]], 1000, loads=loads))
    assert choice is not None
    assert choice.worker == "w1"


def test_no_candidates_no_choice() -> None:
    empty = question([[0]], 10)
    object.__setattr__(empty, "candidates", ())
    assert Cost().choose(empty) is None
    assert KvLoad().choose(empty) is None


def test_two_revisions_of_a_model_are_matched_each_by_its_own_hashes() -> None:
    rig = Rig("w0")
    new = replace(a_record("w9"), model_revision="r2")
    rig.tell(WorkerRegistered(new))
    rig.beat("w9")
    ids = tokens(1, 800)
    hashes = rig.prompts.hashes(address_spaces(new)[new.model], "public", an_ask(prompt_ids=ids))
    rig.core.indexer.on_changes("w9", Changes("e1", 1, (HolderChange(0, False, hashes),), 0), rig.now)
    assert rig.place("r", ids).worker == "w9"
    rig.store("w0", tokens(2, 800))
    assert rig.place("r2", tokens(2, 800)).worker == "w0"
