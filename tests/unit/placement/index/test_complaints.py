"""What users of other fleets complain about (notes on peers, section 2, 1 to 16): it does not happen here."""

from __future__ import annotations

from collections import Counter

from placement_build import a_record
from placement_rig import RATE, Rig, spread, tokens

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import (
    PullSnapshot,
    Tick,
    WorkerLeft,
    WorkerRegistered,
)
from kvfleet.placement.index.changes import Changes, HolderChange
from kvfleet.placement.index.kv_indexer import Follows
from kvfleet.placement.workers.prompts import HashedPrompts
from kvproto.messages import Passed, Snapshot, Tier

EIGHT = [f"w{number}" for number in range(8)]
SYSTEM = tokens(0, 2000)


def test_1_a_shared_system_prompt_does_not_send_all_load_to_one_worker() -> None:
    """dynamo#737."""
    rig = Rig(*EIGHT)
    placements = []
    for number in range(400):
        ids = SYSTEM + tokens(number + 1, 400)
        placements.append(rig.place(f"r{number}", ids))
        rig.finish(placements[-1], ids)
        rig.wait(0.05)
    late = placements[100:]
    assert len({placement.worker for placement in late}) == 8
    assert spread(late) <= 1.25
    hit = sum(placement.expected_hit.get("device", 0) for placement in late)
    assert hit >= 0.95 * 2000 * len(late)


def test_1_nor_on_workers_so_fast_that_nothing_costs_anything() -> None:
    rig = Rig()
    for worker in EIGHT:
        rig.join(worker)
        rig.beat(worker, rate=1e8)
    placements = []
    for number in range(400):
        ids = SYSTEM + tokens(number + 1, 100)
        placements.append(rig.place(f"r{number}", ids))
        rig.finish(placements[-1], ids)
        rig.wait(0.5)
    assert len({placement.worker for placement in placements[100:]}) == 8
    assert spread(placements[100:]) <= 1.5


def test_2_short_single_turn_requests_leave_no_worker_idle() -> None:
    """dynamo#7836: of five, three took all."""
    rig = Rig(*EIGHT[:5])
    running: Counter[str] = Counter()
    for number in range(250):
        ids = tokens(number, 384)
        placement = rig.place(f"r{number}", ids)
        running[placement.worker] += 1
        rig.pass_(placement.worker, f"r{number}", Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, prompt=384)
        rig.wait(0.02)
        if not number % 25:  # heartbeats; nobody is done yet: outputs are long
            for worker in EIGHT[:5]:
                rig.beat(worker, running=running[worker], tokens_per_s=running[worker] * 20)
    assert len(running) == 5
    assert max(running.values()) <= 1.25 * 50


def test_3_replicas_that_decide_at_once_do_not_herd() -> None:
    """dynamo#589: within one metrics period all of them chose the same best worker."""
    rig = Rig(*EIGHT, replicas=4)
    for worker in EIGHT[1:]:
        rig.beat(worker, queued=4000, running=2)  # w0 looks best to everybody
    placements = [rig.place(f"r{number}", tokens(number, 1000), replica=number % 4) for number in range(64)]
    counts = Counter(placement.worker for placement in placements)
    assert max(counts.values()) <= 2 * 64 / 8


def test_4_rounds_of_a_chat_stay_where_the_chat_is_though_all_else_is_equal() -> None:
    """dynamo#3581: equal scores made it a matter of chance."""
    rig = Rig(*EIGHT)
    for chat in range(20):
        ids = tokens(chat, 100)
        workers = []
        for turn in range(6):
            placement = rig.place(f"c{chat}t{turn}", ids)
            workers.append(placement.worker)
            rig.finish(placement, ids)
            rig.wait(1.0)
            ids += tokens(1000 * chat + turn, 60)
        assert len(set(workers)) == 1


def test_4_nor_do_they_move_on_workers_so_fast_that_nothing_costs_anything() -> None:
    rig = Rig()
    for worker in EIGHT:
        rig.join(worker)
        rig.beat(worker, rate=1e7)
    ids, workers = tokens(1, 400), set()
    for turn in range(6):
        placement = rig.place(f"t{turn}", ids)
        workers.add(placement.worker)
        rig.finish(placement, ids)
        rig.wait(1.0)
        ids += tokens(100 + turn, 50)
    assert len(workers) == 1


def test_5_paced_agents_do_not_all_land_on_one_worker() -> None:
    """Infera#103: with nothing in flight at the moment of choice, 448 to 0."""
    rig = Rig("w0", "w1")
    placements = []
    for number in range(448):
        ids = SYSTEM[:48] + tokens(number + 1, 500)
        placements.append(rig.place(f"r{number}", ids))
        rig.finish(placements[-1], ids)
        rig.wait(2.0)
        rig.beat("w0")
        rig.beat("w1")
    assert spread(placements) <= 1.2


def test_6_misses_at_low_concurrency_do_not_all_go_to_the_same_worker() -> None:
    """sglang#32983."""
    rig = Rig(*EIGHT)
    placements = []
    for number in range(400):
        ids = tokens(number, 300)
        placements.append(rig.place(f"r{number}", ids))
        rig.finish(placements[-1], ids)
        rig.wait(5.0)
    assert len({placement.worker for placement in placements}) == 8
    assert spread(placements) <= 1.5


def test_7_new_work_does_not_go_to_the_busiest_worker_because_it_holds_least() -> None:
    """sglang#14532."""
    rig = Rig("empty", "full")
    for number in range(50):
        rig.store("full", tokens(number, 512))
    rig.beat("empty", queued=40_000, waiting=10, running=5)
    rig.beat("full", running=1)
    assert {rig.place(f"r{number}", tokens(1000 + number, 300)).worker for number in range(8)} == {"full"}


def test_8_a_backlog_outweighs_a_cached_prefix_when_it_takes_longer_than_computing_it_again() -> None:
    """production-stack#884."""
    rig = Rig("holder", "other")
    ids = tokens(1, 1600)
    rig.store("holder", ids)
    assert rig.place("r0", ids).worker == "holder"
    rig.beat("holder", queued=int(60 * RATE), waiting=60)
    assert rig.place("r1", ids).worker == "other"


def test_9_nothing_grows_without_bound() -> None:
    """production-stack#687: killed for memory at 2 GB, and at 16."""
    rig = Rig("w0", "w1", blocks=2048)
    size = rig.core.indexer.index.nbytes
    for number in range(600):
        ids = tokens(number, 512)
        placement = rig.place(f"r{number}", ids)
        rig.finish(placement, ids)
        rig.wait(0.2)
    assert rig.core.indexer.index.nbytes == size
    assert len(rig.core.indexer.index) <= 2048
    assert len(rig.core.bookings) == rig.core.bookings.running == 0
    assert len(rig.core.inflight) <= 3
    rig.core.indexer.check_integrity()
    rig.core.check_integrity()


def test_10_a_worker_restarted_in_place_holds_nothing() -> None:
    """llm-d-router#2853."""
    rig = Rig("w0", "w1")
    ids = tokens(1, 800)
    rig.store("w0", ids)
    rig.tell(WorkerRegistered(a_record("w0", epoch="e2")))
    rig.beat("w0", epoch="e2")
    rig.store("w0", tokens(2, 800))  # a last word of the former life
    assert rig.place("r", ids).expected_hit == {}
    assert rig.place("r2", tokens(2, 800)).expected_hit == {}


def a_fresh_core(*workers: str) -> PlacementCore:
    core = PlacementCore(
        "p9",
        "_plc.p9",
        lambda: 0.5,
        PlacementConfig(index_blocks=65_536),
        prompts=HashedPrompts(b"key"),
        unix_ms=lambda: 0,
    )
    for worker in workers:
        core.handle(WorkerRegistered(a_record(worker)), 0.0)
    return core


def snapshot_of(rig: Rig, worker: str, ids: tuple[int, ...]) -> Snapshot:
    return Snapshot("e1", rig.seq[worker], Tier.DEVICE, 0, 1, rig.digest[worker], rig.hashes(ids).tobytes())


def test_11_blocks_whose_parents_an_index_never_saw_are_not_lost_for_good() -> None:
    """llm-d-kv-cache#372: after a restart of the indexer."""
    rig = Rig("w0")
    ids = tokens(1, 1600)
    rig.store("w0", ids[:800])
    core = a_fresh_core("w0")
    rig.cores.append(core)
    rig.store("w0", ids)  # its parents were told of before this core began
    pulls = [action for action in core.handle(Tick(), 0.1) if isinstance(action, PullSnapshot)]
    assert [pull.worker for pull in pulls] == ["w0"]
    core.indexer.on_snapshot("w0", snapshot_of(rig, "w0", ids), 0.2)
    assert core.indexer.state_of("w0") is Follows.EXACT
    assert rig.place("r", ids, replica=1).expected_hit == {"device": 1599}


def test_12_a_gap_is_noticed() -> None:
    """llm-d-router#1737."""
    rig = Rig("w0")
    rig.store("w0", tokens(1, 64))
    rig.seq["w0"] += 1  # one that got lost
    rig.store("w0", tokens(2, 64))
    assert rig.core.indexer.state_of("w0") is Follows.BEHIND


def test_13_what_was_cleared_attracts_nobody() -> None:
    """aibrix#2287."""
    rig = Rig("w0", "w1")
    ids = tokens(1, 800)
    rig.store("w0", ids)
    assert rig.place("r0", ids).expected_hit
    rig.store("w0", ids, removed=True)
    rig.wait(61.0)  # and no promise of the first one is left
    assert not rig.place("r1", ids).expected_hit


def test_14_lost_messages_are_noticed_even_if_nothing_comes_after_them() -> None:
    """dynamo#14167: 30 M messages were skipped."""
    rig = Rig("w0")
    subscriptions, rig.cores = rig.cores, []
    rig.store("w0", tokens(1, 64))  # nobody hears it
    rig.cores = subscriptions
    rig.beat("w0")
    rig.wait(0.3)
    rig.beat("w0")
    assert rig.core.indexer.state_of("w0") is Follows.BEHIND


def test_15_a_fresh_replica_places_sensibly_at_once_and_knows_all_after_a_few_ticks() -> None:
    """dynamo#10580, #10581, #12314: blind, or over 50 s of waiting."""
    names = [f"w{number:02}" for number in range(64)]
    rig = Rig(*names)
    prompts = {name: tokens(number, 320) for number, name in enumerate(names)}
    for name in names:
        rig.store(name, prompts[name])
    core = a_fresh_core(*names)
    rig.cores = [core]
    for name in names:
        rig.beat(name, queued=0 if name != "w63" else 400_000)
    early = [rig.place(f"early{number}", tokens(900 + number, 300)) for number in range(128)]
    assert "w63" not in {placement.worker for placement in early}
    assert spread(early) <= 2.0
    ticks = 0
    while any(core.indexer.state_of(name) is not Follows.EXACT for name in names):
        ticks += 1
        rig.now += 0.1
        for action in core.handle(Tick(), rig.now):
            if isinstance(action, PullSnapshot):
                part = snapshot_of(rig, action.worker, prompts[action.worker])
                core.indexer.on_snapshot(action.worker, part, rig.now)
    assert ticks <= 10
    assert all(rig.place(f"r{name}", prompts[name]).worker == name for name in names[:63])


def test_16_replicas_agree_so_one_that_takes_over_misses_nothing() -> None:
    """aibrix#2401, smg#1578."""
    rig = Rig(*EIGHT, replicas=2)
    at: dict[int, str] = {}
    for chat in range(40):
        ids = tokens(chat, 640)
        placement = rig.place(f"c{chat}", ids, replica=0)
        at[chat] = placement.worker
        rig.finish(placement, ids)
        rig.wait(0.1)
    for chat in range(40):
        assert rig.place(f"again{chat}", tokens(chat, 640), replica=1).worker == at[chat]


def test_16_and_count_one_anothers_load() -> None:
    rig = Rig("w0", "w1", replicas=2)
    first = rig.place("r0", tokens(0, 8000), replica=0)
    second = rig.place("r1", tokens(1, 8000), replica=1)
    assert first.worker != second.worker
    for core in rig.cores:
        assert sorted(core.workloads.view(core.fleet.ready("demo").columns, 0.0).requests.tolist()) == [1, 1]


# ---------------------------------------------------------------------------------------------- bad events


def test_a_worker_that_claims_what_it_has_not_is_believed_less_and_less_and_harms_nobody_else() -> None:
    rig = Rig("honest", "liar")
    ids = [tokens(number, 1600) for number in range(40)]
    for one in ids:
        rig.store("liar", one)
        rig.store("honest", one[:800])
    believed = []
    for number, one in enumerate(ids):
        placement = rig.place(f"r{number}", one)
        believed.append(placement.worker)
        found = 0 if placement.worker == "liar" else 800
        rig.pass_(
            placement.worker,
            f"r{number}",
            Passed.ACCEPTED,
            Passed.STARTED,
            Passed.FIRST_TOKEN,
            Passed.ENDED,
            prompt=1600,
            cached=found,
        )
        rig.wait(1.0)
    assert believed[0] == "liar"
    assert Counter(believed[20:])["liar"] <= 10
    assert rig.core.fleet.workers["honest"].experience.belief.value == "exact"


def test_events_that_are_repeated_or_swapped_or_of_strangers_change_nobody_elses_blocks() -> None:
    rig = Rig("good", "bad")
    ids = tokens(1, 800)
    rig.store("good", ids)
    hashes = rig.hashes(ids)
    for seq in (5, 3, 3, 2**62, 1, 1, 4, 0):
        for removed in (True, False):
            for worker, epoch in (("bad", "e1"), ("stranger", "e1"), ("good", "another life")):
                changes = Changes(epoch, seq, (HolderChange(0, removed, hashes),), 7)
                rig.core.indexer.on_changes(worker, changes, rig.now)
    assert rig.core.indexer.state_of("good") is Follows.EXACT
    assert rig.core.indexer.find_matches([row.tobytes() for row in hashes])["good"] == 50
    rig.core.indexer.check_integrity()


def test_a_worker_that_claims_more_than_the_index_holds_pushes_out_its_own_first() -> None:
    rig = Rig("good", "greedy", blocks=1024)
    ids = tokens(1, 4096)
    rig.store("good", ids)
    for number in range(40):
        rig.store("greedy", tokens(100 + number, 1024))
    assert rig.place("r", ids).worker == "good"
    assert rig.core.indexer.index.held_by(rig.core.indexer._followers["good"].holder) == 256


def test_heartbeats_that_promise_the_impossible_break_nothing() -> None:
    rig = Rig("w0", "w1")
    rig.beat("w0", rate=1e15, queued=2**62, waiting=2**40, running=2**40)
    rig.beat("w1", rate=1e-12)
    for number in range(10):
        rig.place(f"r{number}", tokens(number, 100))
    rig.core.check_integrity()


def test_a_worker_that_was_left_out_is_followed_once_there_is_room() -> None:
    """A rolling upgrade has twice as many workers for a while."""
    rig = Rig()
    rig.cores = [
        PlacementCore(
            "p0",
            "_plc.p0",
            lambda: 0.5,
            PlacementConfig(index_blocks=4096, max_workers=2),
            prompts=rig.prompts,
            unix_ms=lambda: 0,
        )
    ]
    for worker in ("old0", "old1", "new0", "new1"):
        rig.join(worker)
    assert rig.core.indexer.state_of("new0") is None
    rig.tell(WorkerLeft("old0"))
    rig.tell(WorkerLeft("old1"))
    for worker in ("new0", "new1"):
        rig.beat(worker)
        rig.store(worker, tokens(1, 64))
        assert rig.core.indexer.state_of(worker) is Follows.EXACT
    assert rig.core.indexer.left_out_total == 2
