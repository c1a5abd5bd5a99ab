"""Numbered events and their digest."""

from __future__ import annotations

from engine_rig import Transcript, make_engine, spec

from kvproto.messages import BlockRun, KvEvents, Tier, TierEvents
from services.worker.cache_events import CacheEvents
from services.worker.outputs import StepResult

A, B, C, P = (bytes([letter]) * 16 for letter in b"abcp")


def test_removals_come_before_stores_and_results_stay_in_order() -> None:
    events = CacheEvents("e1")
    results = [StepResult(stored=[(P, [A, B])]), StepResult(), StepResult(removed=[B], stored=[(A, [C])])]
    assert events.batch(results) == KvEvents(
        "e1",
        1,
        (
            TierEvents(Tier.DEVICE, False, (BlockRun(P, (A, B)),)),
            TierEvents(Tier.DEVICE, True, (BlockRun(b"", (B,)),)),
            TierEvents(Tier.DEVICE, False, (BlockRun(A, (C,)),)),
        ),
    )
    assert events.digest == int.from_bytes(A[:8], "little") ^ int.from_bytes(C[:8], "little")


def test_nothing_changed_is_no_event() -> None:
    events = CacheEvents("e1")
    assert events.batch([StepResult()]) is None
    assert (events.seq, events.digest, events.seq_of(0)) == (0, 0, 0)


def test_a_snapshot_digest_tells_its_event() -> None:
    events = CacheEvents("e1")
    digests = []
    for block in (A, B, C):
        events.batch([StepResult(stored=[(P, [block])])])
        digests.append(events.digest)
    assert [events.seq_of(digest) for digest in digests] == [1, 2, 3]
    assert events.seq_of(12345) == 0


def test_a_listener_that_applies_all_events_holds_what_the_engine_holds() -> None:
    engine, events, held = make_engine(blocks=12, block_size=2, slots=2), CacheEvents("e1"), set()
    for at in range(10):
        engine.add(spec(f"r{at}", [at % 3, 1, 2, 3, at], max_tokens=7))
    transcript, digest = Transcript(), 0
    while engine.has_work:
        result = engine.step()
        transcript.take(result)
        event = events.batch([result])
        for change in event.changes if event else ():
            for run in change.runs:
                held = held - set(run.hashes) if change.removed else held | set(run.hashes)
                for block_hash in run.hashes:
                    digest ^= int.from_bytes(block_hash[:8], "little")
        assert held == set(engine.cached_hashes())
        assert digest == events.digest == engine.digest
    assert engine.load().evictions_total > 0
