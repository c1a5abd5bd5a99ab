"""What is being computed is as good as held, until it is there or is not going to be."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_build import a_core, a_generate, failed
from placement_rig import Rig, tokens

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Forward, WorkerAnswered
from kvfleet.placement.workers.inflight_blocks import EVENTS_S, LIMIT_S, BlockCounts, InflightBlocks
from kvfleet.placement.workers.prompts import HashedPrompts
from kvproto.messages import Booked, BookedBatch, Passed


def test_two_requests_with_one_new_prefix_meet_though_no_event_was_heard() -> None:
    rig = Rig(*(f"w{number}" for number in range(8)))
    shared = tokens(1, 4000)
    first = rig.place("r0", shared + tokens(2, 100))
    rig.now += 0.001
    second = rig.place("r1", shared + tokens(3, 100))
    assert second.worker == first.worker
    assert second.expected_hit == {"device": 4000}


def test_a_promise_is_broken_with_its_request() -> None:
    rig = Rig("w0", "w1")
    first = rig.place("r0", tokens(1, 800))
    rig.place("r0", tokens(1, 800), attempt=1, excluded=(first.worker,))  # refused there
    assert len(rig.core.inflight) == 1
    second = rig.place("r1", tokens(1, 800))
    assert second.worker != first.worker


def test_an_earlier_attempts_end_does_not_end_the_promise_of_the_next() -> None:
    rig = Rig("w0", "w1")
    first = rig.place("r", tokens(1, 800))
    second = rig.place("r", tokens(1, 800), attempt=1, excluded=(first.worker,))
    rig.pass_(first.worker, "r", Passed.ENDED)
    rig.wait(1.0)
    assert rig.place("other", tokens(1, 800)).worker == second.worker
    assert rig.place("another", tokens(1, 800)).expected_hit == {"device": 799}


def test_of_a_request_that_no_worker_was_heard_of_nothing_is_expected() -> None:
    rig = Rig("w0", "w1")
    first = rig.place("r", tokens(1, 800))
    rig.wait(0.6)
    rig.beat(first.worker)
    assert len(rig.core.inflight) == 0


def test_a_bare_request_that_is_refused_promises_nothing() -> None:
    core = a_core("w1", policy="cost")
    (offer,) = core.handle(a_generate("r", prompt=None, prompt_ids=tokens(1, 800)), 1.0)
    assert len(core.inflight) == 1
    core.handle(WorkerAnswered(failed("r", 0, "context_length_exceeded", retryable=False)), 1.1)
    assert len(core.inflight) == 0
    assert isinstance(offer, Forward)


def test_what_was_promised_and_not_found_is_not_held_against_the_worker() -> None:
    rig = Rig("w0")
    for number in range(20):
        rig.place(f"a{number}", tokens(number, 800))
        rig.place(f"b{number}", tokens(number, 800))
        rig.pass_("w0", f"b{number}", Passed.ACCEPTED, Passed.STARTED, prompt=800)
    assert rig.core.fleet.workers["w0"].experience.belief.value == "exact"


def test_promises_end() -> None:
    rig = Rig("w0")
    hashes = rig.hashes(tokens(1, 160))
    inflight = InflightBlocks(1024, 4)
    inflight.make(("t", "kept"), "w0", hashes, 0.0)
    inflight.make(("t", "forgotten"), "w0", rig.hashes(tokens(2, 160)), 0.0)
    inflight.fulfil(("t", "kept"), "w0", 1.0)
    inflight.tick(1.0 + EVENTS_S)
    found = inflight.depths(hashes, ["w0", "stranger"])
    assert found is not None
    assert found.tolist() == [10, 0]
    inflight.tick(1.1 + EVENTS_S)
    assert len(inflight) == 1
    inflight.check_integrity()
    inflight.tick(0.1 + LIMIT_S)
    assert len(inflight) == 0
    assert inflight.depths(hashes, ["w0"]) is None
    inflight.check_integrity()


def test_a_worker_takes_its_promises_along() -> None:
    rig = Rig("w0")
    inflight = InflightBlocks(1024, 2)
    for number, worker in enumerate(["w0", "w1", "w2"]):  # one more than there is room for
        inflight.make(("t", str(number)), worker, rig.hashes(tokens(number, 160)), 0.0)
    assert len(inflight) == 2
    inflight.drop_worker("w0")
    inflight.drop_worker("w0")
    assert len(inflight) == 1
    inflight.make(("t", "2"), "w2", rig.hashes(tokens(2, 160)), 0.0)
    assert len(inflight) == 2
    inflight.check_integrity()


def test_there_is_room_for_every_worker_that_the_index_follows() -> None:
    core = PlacementCore(
        "p1",
        "_plc.p1",
        lambda: 0.0,
        PlacementConfig(index_blocks=4096, max_workers=300),
        prompts=HashedPrompts(b"key"),
        unix_ms=lambda: 0,
    )
    rig = Rig("w0")
    for number in range(300):
        core.inflight.make(("t", str(number)), f"w{number}", rig.hashes(tokens(number, 160)), 0.0)
    assert len(core.inflight) == 300
    assert core.inflight.max_made > 300 * 64, "what all of them run, and some more"
    assert core.ledger.kept_in_all > 300 * 64, "and each can be told of"


def test_what_two_promises_have_in_common_stays_as_long_as_one_of_them() -> None:
    """The first of two that wait for one document is done: the second is still to come, and a third one joins it."""
    rig = Rig("w0")
    document = tokens(1, 160)
    one, other = rig.hashes(document + tokens(2, 32)), rig.hashes(document + tokens(3, 32))
    inflight = InflightBlocks(1024, 4)
    inflight.make(("t", "one"), "w0", one, 0.0)
    inflight.make(("t", "other"), "w0", other, 0.0)
    inflight.break_off(("t", "one"))
    inflight.check_integrity()
    assert [found.tolist() for chain in (one, other) if (found := inflight.depths(chain, ("w0",))) is not None] == [
        [10],
        [12],
    ]
    inflight.break_off(("t", "other"))
    inflight.check_integrity()
    assert inflight.depths(one, ("w0",)) is None


def test_what_another_replica_placed_is_promised_here_too() -> None:
    """Until it is computed, however long it waits: no event can have told of it."""
    rig = Rig(*(f"w{number}" for number in range(8)))
    document = tokens(1, 4000)
    hashes = rig.hashes(document + tokens(2, 100)).tobytes()
    told = Booked("public", "there", 0, "w5", 4100, hashes=hashes)
    rig.tell(BookedBatch("another", (told,)))
    here = rig.place("here", document + tokens(3, 100))
    assert (here.worker, here.expected_hit) == ("w5", {"device": 4000})
    rig.tell(BookedBatch("another", (Booked("public", "odd", 0, "w5", 16, hashes=hashes[:21]),)))
    rig.core.check_integrity()


@pytest.mark.parametrize("last", [Passed.FIRST_TOKEN, Passed.ENDED])
def test_what_another_replica_placed_and_a_worker_has_computed_since_is_not_promised(last: Passed) -> None:
    """Its word may come before the other replica's; a promise made then would stay until its time is up."""
    rig = Rig("w0")
    rig.pass_("w0", "r", Passed.ACCEPTED, Passed.STARTED, last)
    told = Booked("public", "r", 0, "w0", 800, hashes=rig.hashes(tokens(1, 800)).tobytes())
    rig.tell(BookedBatch("another", (told,)))
    assert len(rig.core.inflight) == 0


def test_two_replicas_send_one_new_prefix_to_one_worker() -> None:
    rig = Rig(*(f"w{number}" for number in range(8)), replicas=2)
    shared = tokens(1, 4000)
    first = rig.place("r0", shared + tokens(2, 100))
    second = rig.place("r1", shared + tokens(3, 100), replica=1)
    assert (second.worker, second.expected_hit) == (first.worker, {"device": 4000})


CHAINS = st.lists(st.text("abc", max_size=30), min_size=1, max_size=6)


@settings(deadline=None)
@given(CHAINS, st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_blocks_are_counted_and_those_of_no_other_chain_told(paths: list[str], steps: list[tuple[bool, int]]) -> None:
    """Against a plain counter; blocks that want the same place, too."""

    def hashed(path: str) -> np.ndarray:
        blocks = [path[: depth + 1] for depth in range(len(path))]
        return np.array([[len(block) % 3, crc32(block.encode())] for block in blocks], dtype=np.uint64).reshape(-1, 2)

    counts, naive, chains = BlockCounts(), Counter[bytes](), [hashed(path) for path in paths]
    added: list[np.ndarray] = []
    for adds, number in steps:
        if adds:
            added.append(chains[number % len(chains)])
            counts.add(added[-1])
            naive.update(block.tobytes() for block in added[-1])
        elif added:
            taken = added.pop(number % len(added))
            naive.subtract(block.tobytes() for block in taken)
            assert [block.tobytes() for block in counts.take(taken)] == [
                block.tobytes() for block in taken if not naive[block.tobytes()]
            ]
        assert counts.used == sum(count > 0 for count in naive.values())


def test_counts_of_more_blocks_than_there_were_places() -> None:
    counts, chance = BlockCounts(), np.random.default_rng(1)
    chains = [chance.integers(0, 2**64, (100, 2), dtype=np.uint64) for _ in range(30)]
    for chain in [*chains, *chains]:
        counts.add(chain)
    assert counts.used == 3000
    assert [len(counts.take(chain)) for chain in [*chains, *chains]] == [0] * 30 + [100] * 30
    assert counts.used == 0
