"""Slots for recurrent states: who has them, which snapshots are found, and which go."""

from __future__ import annotations

import pytest

from kvfleet.worker.blocks.content_index import Content, ContentIndex
from kvfleet.worker.blocks.state_slots import StatePoint, StateSlots
from kvproto.block_hash import ForkedRoot, chain

ROOT = b"tenant root 16 b"
IDS = list(range(20))
HASHES = chain(ROOT, IDS, 4)


def kept(slots: StateSlots, *points: StatePoint) -> list[int]:
    taken = []
    for point in points:
        taken.append(slots.take())
        slots.keep(taken[-1], point)
    return taken


def test_the_longest_prefix_with_a_snapshot_is_found() -> None:
    slots = StateSlots(8, 4, every=2)
    second, inside = kept(slots, StatePoint(HASHES[1], ()), StatePoint(HASHES[2], (12, 13)))
    assert slots.find(ROOT, HASHES, IDS, 20) == (14, inside)
    assert slots.find(ROOT, HASHES, IDS, 13) == (8, second)
    assert slots.find(ROOT, HASHES, [*IDS[:13], 99, 98, 97], 16) == (8, second)
    assert slots.find(ROOT, HASHES, IDS, 7) == (0, -1)
    slots.check_integrity([])


def test_room_is_made_by_the_least_recently_used_that_nobody_copies() -> None:
    slots = StateSlots(3, 4, every=1)
    first, second, third = kept(slots, *(StatePoint(one, ()) for one in HASHES[:3]))
    slots.touch(first)
    slots.pin(second)
    assert slots.take(first) == third
    assert slots.take_copies()[-1] == (first, third)
    assert slots.take_empty() == first
    assert slots.take_empty() is None
    with pytest.raises(LookupError):
        slots.take()
    slots.check_integrity([third, first])
    slots.unpin(second)
    assert slots.take_empty() == second
    assert slots.evictions == 3


def test_a_snapshot_leaves_with_its_block() -> None:
    slots = StateSlots(4, 4, every=1)
    kept(slots, StatePoint(HASHES[0], ()), StatePoint(HASHES[1], (8, 9)), StatePoint(HASHES[2], ()))
    slots.pin(slots.at(HASHES[2]) or 0)
    slots.unlisted(Content.of(ROOT, HASHES, 2, IDS[8:12], full=True, lossy=False))
    assert slots.find(ROOT, HASHES, IDS, 20) == (4, slots.at(HASHES[0]))
    assert slots.available == 3  # the other one is still being copied
    slots.check_integrity([])
    slots.unpin(next(iter(slots._pins)))
    assert slots.available == 4
    slots.check_integrity([])


def test_exact_requests_find_no_lossy_state_and_replace_it() -> None:
    slots = StateSlots(4, 4, every=1)
    (lossy,) = kept(slots, StatePoint(HASHES[0], (), lossy=True))
    assert slots.find(ROOT, HASHES, IDS, 20) == (4, lossy)
    assert slots.find(ROOT, HASHES, IDS, 20, exact=True) == (0, -1)
    (exact,) = kept(slots, StatePoint(HASHES[0], ()))
    assert slots.find(ROOT, HASHES, IDS, 20, exact=True) == (4, exact)
    kept(slots, StatePoint(HASHES[0], (), lossy=True))
    assert slots.find(ROOT, HASHES, IDS, 20, exact=True) == (4, exact)
    assert slots.available == 4


def test_tenants_share_the_snapshot_at_a_public_prefixs_end_and_none_behind_it() -> None:
    slots = StateSlots(4, 4, every=8)
    one, other = (ForkedRoot(b"public root 16 b", own, 2) for own in (ROOT, b"another root 16b"))
    hashes, others = chain(one, IDS, 4), chain(other, IDS, 4)
    (shared,) = kept(slots, StatePoint(hashes[1], ()))
    assert slots.find(one, hashes, IDS, 20) == slots.find(other, others, IDS, 20) == (8, shared)
    kept(slots, StatePoint(hashes[2], ()))
    assert slots.find(one, hashes, IDS, 20)[0] == 12
    assert slots.find(other, others, IDS, 20)[0] == 8


def test_points() -> None:
    slots = StateSlots(1, 4, every=2)
    assert [*slots.points(0, 8)] == [8]
    assert [*slots.points(8, 15)] == []
    assert [*slots.points(7, 25)] == [8, 16, 24]


def test_a_slot_taken_between_steps_is_not_zeroed_by_the_next_one() -> None:
    """As for a sequence that began anew and was cancelled before a step."""
    slots = StateSlots(2, 4, every=1)
    gone = slots.take()
    slots.give_back(gone)
    other = slots.take()
    slots.give_back(other)
    assert slots.take_now() == gone == other
    assert slots.take_copies() == []
    slots.check_integrity([gone])


def test_what_is_erased_inside_a_block_that_is_not_cached_goes_too() -> None:
    index, slots = ContentIndex(), StateSlots(4, 4, every=1)
    kept(slots, StatePoint(HASHES[1], (8, 9)), StatePoint(HASHES[1], (8, 9, 10)), StatePoint(HASHES[1], (8, 7)))
    slots.erase(ROOT, HASHES[:2], IDS[:11], 10, index)
    assert sorted(slots[slot].ids for slot in slots) == [(8, 7), (8, 9)], "one is another's, and one was to be kept"
    index.add(3, Content.of(ROOT, HASHES, 2, IDS[8:10], full=False, lossy=False))
    slots.erase(ROOT, HASHES[:2], IDS[:11], 0, index)
    assert sorted(slots[slot].ids for slot in slots) == [(8, 7), (8, 9)], "its block is cached"
    index.remove(3)
    slots.erase(ROOT, HASHES[:2], IDS[:11], 0, index)
    assert [slots[slot].ids for slot in slots] == [(8, 7)]
    slots.check_integrity([])


def test_snapshots_that_are_copied_leave_running_sequences_their_slots() -> None:
    slots = StateSlots(3, 4, every=1)
    first, second, _ = kept(slots, *(StatePoint(one, ()) for one in HASHES[:3]))
    assert slots.most_sequences == 2
    slots.pin(first)
    assert not slots.may_pin
    assert sorted([slots.take(), slots.take()]) == [second, 2]
