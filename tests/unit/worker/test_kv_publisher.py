"""Numbered events, when they leave, their digest, and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from engine_rig import Transcript, make_engine, spec

from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.port.outputs import KvPublisher, StepResult
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import OutOfMemory
from kvproto.messages import BlockRun, KvEvents, Tier, TierEvents
from kvsampling.draw import Drawn
from kvservice.event_log import HASHES_PER_PART, IDLE_PERIOD_S

A, B, C, P = (bytes([letter]) * 16 for letter in b"abcp")


def changed(removed: Sequence[bytes] = (), stored: Sequence[tuple[bytes, Sequence[bytes]]] = ()) -> list[TierEvents]:
    """As a pool tells it: removals first."""
    runs = tuple(BlockRun(parent, tuple(hashes)) for parent, hashes in stored)
    gone = [TierEvents(Tier.DEVICE, True, (BlockRun(b"", tuple(removed)),))] if removed else []
    return gone + ([TierEvents(Tier.DEVICE, False, runs)] if runs else [])


def ran(**changes: Any) -> StepResult:
    return StepResult(sequences=1, changes=changed(**changes))


def idle(**changes: Any) -> StepResult:
    return StepResult(changes=changed(**changes))


def test_removals_come_before_stores_and_results_stay_in_order() -> None:
    publisher = KvPublisher("e1")
    results = [ran(stored=[(P, [A, B])]), ran(), ran(removed=[B], stored=[(A, [C])])]
    assert publisher.batch(results, 0.0) == KvEvents(
        "e1",
        1,
        (
            TierEvents(Tier.DEVICE, False, (BlockRun(P, (A, B)),)),
            TierEvents(Tier.DEVICE, True, (BlockRun(b"", (B,)),)),
            TierEvents(Tier.DEVICE, False, (BlockRun(A, (C,)),)),
        ),
    )
    assert publisher.digest == int.from_bytes(A[:8], "little") ^ int.from_bytes(C[:8], "little")


def test_nothing_changed_is_no_event() -> None:
    publisher = KvPublisher("e1")
    assert publisher.batch([ran(), idle()], 0.0) is None
    assert publisher.due is None
    assert publisher.flush(9.0) is None
    assert (publisher.seq, publisher.digest, publisher.snapshot({}, 0)[0].seq) == (0, 0, 0)


def test_a_snapshot_digest_tells_its_event() -> None:
    publisher = KvPublisher("e1")
    digests = []
    for block in (A, B, C):
        publisher.batch([ran(stored=[(P, [block])])], 0.0)
        digests.append(publisher.digest)
    assert [publisher.snapshot({}, digest)[0].seq for digest in digests] == [1, 2, 3]
    assert publisher.snapshot({}, 12345)[0].seq == 0


def test_a_listener_that_applies_all_events_holds_what_the_engine_holds() -> None:
    engine, publisher, held = make_engine(blocks=12, block_size=2, slots=2), KvPublisher("e1"), set()
    for at in range(10):
        engine.add(spec(f"r{at}", [at % 3, 1, 2, 3, at], max_tokens=7))
    transcript, digest, steps = Transcript(), 0, 0
    while engine.has_work:
        result = engine.step()
        steps += 1
        transcript.take(result)
        event = publisher.batch([result], 0.0, hold=False)
        for change in event.changes if event else ():
            for run in change.runs:
                held = held - set(run.hashes) if change.removed else held | set(run.hashes)
                for block_hash in run.hashes:
                    digest ^= int.from_bytes(block_hash[:8], "little")
        assert held == set(engine.kv.holdings()[Tier.DEVICE])
        assert digest == publisher.digest == engine.kv.digest
        assert publisher.seq <= steps
    assert engine.load().evictions_total > 0


# ---------------------------------------------------------------------------------------------- when


def test_at_most_one_event_for_each_step_that_ran() -> None:
    publisher = KvPublisher("e1")
    for at in range(100):  # a step every 100 us, each of which changed something
        publisher.batch([ran(stored=[(P, [bytes([at]) * 16])])], at * 1e-4)
        assert publisher.seq == at + 1
    assert publisher.batch([ran(stored=[(P, [A])]), ran(stored=[(P, [B])])], 0.01) is not None
    assert publisher.seq == 101, "two steps heard of at once are one event"


def test_while_nothing_runs_events_are_50_ms_apart_and_none_waits_longer() -> None:
    publisher = KvPublisher("e1")
    sent: list[tuple[float, KvEvents]] = []
    changes = [bytes([at]) * 16 for at in range(200)]
    for at, block in enumerate(changes):
        now = at * 1e-3
        if publisher.due is not None and publisher.due <= now:  # as the loop's timer does
            sent.append((now, publisher.flush(now)))
        event = publisher.batch([idle(stored=[(P, [block])])], now)
        sent += [(now, event)] if event else []
    assert publisher.due == pytest.approx(sent[-1][0] + IDLE_PERIOD_S)
    sent.append((publisher.due, publisher.flush(publisher.due)))
    times = [now for now, _ in sent]
    assert times[0] == 0.0, "the first one waits for nothing"
    assert all(later - sooner >= IDLE_PERIOD_S - 1e-9 for sooner, later in pairwise(times))
    assert len(sent) == 5
    told = [one for _, event in sent for change in event.changes for run in change.runs for one in run.hashes]
    assert told == changes
    assert [event.seq for _, event in sent] == [1, 2, 3, 4, 5]


def test_what_waits_leaves_with_the_next_step_and_digest_and_number_move_together() -> None:
    publisher = KvPublisher("e1")
    publisher.batch([ran(stored=[(P, [A])])], 1.0)
    before = publisher.seq, publisher.digest
    assert publisher.batch([idle(removed=[A])], 1.01) is None
    assert (publisher.seq, publisher.digest) == before, "a heartbeat says what was sent"
    event = publisher.batch([ran(stored=[(P, [B])])], 1.02)
    assert event is not None
    assert [(change.removed, change.runs[0].hashes) for change in event.changes] == [(True, (A,)), (False, (B,))]
    assert publisher.due is None


def test_while_a_snapshot_is_taken_nothing_waits() -> None:
    publisher = KvPublisher("e1")
    publisher.batch([idle(stored=[(P, [A])])], 0.0)
    publisher.batch([idle(stored=[(P, [B])])], 0.001)
    assert publisher.seq == 1
    assert publisher.flush(0.002) is not None
    for at, block in enumerate((C, P)):
        assert publisher.batch([idle(stored=[(A, [block])])], 0.003, hold=False) is not None
        assert publisher.snapshot({}, publisher.digest)[0].seq == 3 + at


class FullRunner(FakeRunner):
    """Has no memory for any step."""

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        raise OutOfMemory("no room")


def test_steps_of_an_engine_that_run_nothing_do_not_become_a_message_each() -> None:
    """Each evicts a block for a request that then fails: as many steps as there are requests, and one event."""
    warm = make_engine(blocks=4, block_size=4)
    warm.add(spec("r", range(8), max_tokens=4))
    Transcript().run(warm)
    assert warm.kv.holdings()[Tier.DEVICE]
    engine = warm
    engine.runner = FullRunner(num_blocks=4, block_size=4, vocab_size=1000, context_length=512)
    publisher = KvPublisher("e1")
    publisher.batch([ran(stored=[(P, [P])])], 0.0)
    removals = steps = 0
    for at in range(8):
        engine.add(spec(f"f{at}", range(100 + 8 * at, 112 + 8 * at)))
        while engine.has_work:
            result = engine.step()
            steps += 1
            removals += any(change.removed for change in result.changes)
            assert result.sequences == 0
            assert publisher.batch([result], steps * 1e-3) is None
    assert removals > 0
    assert publisher.flush(0.05) is not None
    assert publisher.seq == 2


# ---------------------------------------------------------------------------------------------- snapshots


def test_a_snapshot_of_an_empty_worker_is_one_empty_part() -> None:
    publisher = KvPublisher("e1")
    (part,) = publisher.snapshot({Tier.DEVICE: []}, 0)
    assert (part.epoch, part.seq, part.tier, part.part, part.parts, part.hashes) == ("e1", 0, Tier.DEVICE, 0, 1, b"")
    (part,) = publisher.snapshot({Tier.DEVICE: []}, 0, Tier.HOST)
    assert (part.tier, part.parts, part.hashes) == (Tier.HOST, 1, b"")


def test_parts_are_numbered_across_tiers_and_of_one_event() -> None:
    publisher = KvPublisher("e1")
    publisher.batch([ran(stored=[(P, [A])])], 0.0)
    digest = publisher.digest
    publisher.batch([ran(stored=[(A, [B])])], 0.0)  # came after what the snapshot shows
    device = [at.to_bytes(16, "big") for at in range(HASHES_PER_PART + 1)]
    held = {Tier.DEVICE: device, Tier.HOST: [], Tier.VAULT: [C]}
    parts = publisher.snapshot(held, digest)
    assert [(part.tier, part.part, part.parts) for part in parts] == [
        (Tier.DEVICE, 0, 3),
        (Tier.DEVICE, 1, 3),
        (Tier.VAULT, 2, 3),
    ]
    assert {(part.epoch, part.seq, part.digest) for part in parts} == {("e1", 1, digest)}
    assert b"".join(part.hashes for part in parts) == b"".join(device) + C
    assert [(part.tier, part.part, part.parts) for part in publisher.snapshot(held, digest, Tier.VAULT)] == [
        (Tier.VAULT, 0, 1)
    ]


def test_a_snapshot_under_an_unknown_digest_is_of_no_event() -> None:
    assert [part.seq for part in KvPublisher("e1").snapshot({Tier.DEVICE: [A]}, 12345)] == [0]
