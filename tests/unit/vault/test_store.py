"""What a vault's store keeps, shows, lets go of and refuses; every counter that should move moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvfleet.vault.store.block_table import bytes_for
from kvfleet.vault.store.store import VaultStore
from kvproto.dataplane.block import BlockHeader
from tests.support.kv_blocks import OTHER_ROOT, ROOT, Block, block, chain, hashes

ONE = bytes_for(chain(1)[0].header)  # what one block takes


def a_store(blocks: float = 8, **more: object) -> VaultStore:
    return VaultStore(int(blocks * ONE), **more)  # type: ignore[arg-type]


def put(store: VaultStore, *blocks: Block) -> list[bool]:
    """As a connection does it."""
    done = []
    for one in blocks:
        buffer = store.reserve(one.header)
        if buffer is None:
            done.append(False)
            continue
        buffer[:] = one.payload
        done.append(store.commit(one.header, buffer))
    store.check_integrity()
    return done


def get(
    store: VaultStore, asked: Sequence[Block], root: bytes = ROOT, exact: bool = False
) -> list[tuple[BlockHeader, bytes] | None]:
    served = store.get(root, hashes(asked), exact)
    found = [None if one is None else (one[0], bytes(one[1])) for one in served.blocks]
    served.release()
    store.check_integrity()
    return found


def as_put(blocks: Sequence[Block]) -> list[tuple[BlockHeader, bytes] | None]:
    return [(one.header, one.payload) for one in blocks]


def test_what_was_put_comes_back() -> None:
    store, blocks = a_store(), chain(3)
    assert get(store, blocks) == [None] * 3
    assert put(store, *blocks) == [True] * 3
    assert get(store, blocks) == as_put(blocks)
    assert store.has(ROOT, hashes([*blocks, *chain(1, first_id=99)]), False) == [True, True, True, False]
    counters = store.counters
    assert (counters.stored_total, counters.stored_bytes_total) == (3, 3 * 1024)
    assert (counters.hits_total, counters.hit_bytes_total, counters.misses["absent"]) == (3, 3 * 1024, 3)


def test_nobody_sees_a_block_before_its_commit() -> None:
    store, (one,) = a_store(), chain(1)
    buffer = store.reserve(one.header)
    assert buffer is not None
    assert len(buffer) == one.header.length
    assert store.has(ROOT, [one.hash], False) == [False]
    assert get(store, [one]) == [None]
    assert store.take_changes() == []
    buffer[:] = one.payload
    assert store.commit(one.header, buffer)
    assert get(store, [one]) == as_put([one])
    assert [change.hash for change in store.take_changes()] == [one.hash]


def test_an_abandoned_buffer_is_used_again() -> None:
    store, (first, second) = a_store(1), chain(2)
    buffer = store.reserve(first.header)
    assert buffer is not None
    assert store.reserve(second.header) is None, "all memory is being received to"
    store.abandon(first.header, buffer)
    store.check_integrity()
    assert store.counters.abandoned_total == 1
    assert put(store, second) == [True]
    assert store.counters.refused["no_room"] == 1


def test_of_two_commits_of_one_hash_the_first_wins() -> None:
    store = a_store()
    mine, theirs = block(ROOT, 0), block(ROOT, 0, salt=1)
    buffers = [store.reserve(one.header) for one in (mine, theirs)]
    for one, buffer in zip((mine, theirs), buffers, strict=True):
        assert buffer is not None
        buffer[:] = one.payload
    assert buffers[1] is not None
    assert store.commit(theirs.header, buffers[1])
    assert buffers[0] is not None
    assert not store.commit(mine.header, buffers[0])
    assert get(store, [mine]) == as_put([theirs])
    assert put(store, mine) == [False]
    assert store.counters.refused["held"] == 2
    assert len(store.take_changes()) == 1


def test_an_exact_block_takes_the_place_of_a_lossy_one_and_never_the_other_way_round() -> None:
    store = a_store()
    lossy, exact = block(ROOT, 0, lossy=True, size=300), block(ROOT, 0)
    assert put(store, lossy) == [True]
    assert put(store, block(ROOT, 0, lossy=True, size=300, salt=1)) == [False]
    assert store.has(ROOT, [lossy.hash], True) == [False]
    assert get(store, [lossy], exact=True) == [None]
    assert store.counters.misses["lossy"] == 1
    served = store.get(ROOT, [lossy.hash], False)
    assert put(store, exact) == [True]
    assert served.blocks[0] is not None
    assert bytes(served.blocks[0][1]) == lossy.payload, "it is being sent"
    served.release()
    assert get(store, [exact], exact=True) == as_put([exact])
    assert put(store, lossy) == [False]
    assert get(store, [exact]) == as_put([exact])
    assert store.counters.replaced_total == 1
    assert len(store.take_changes()) == 1, "it is the same block to everybody else"


def test_two_tenants_with_equal_tokens_never_meet() -> None:
    store = a_store(16)
    ours, theirs = chain(4), chain(4, root=OTHER_ROOT)
    assert not set(hashes(ours)) & set(hashes(theirs))
    put(store, *ours, *theirs)
    assert get(store, ours) == as_put(ours)
    assert get(store, theirs, root=OTHER_ROOT) == as_put(theirs)
    assert get(store, ours, root=OTHER_ROOT) == [None] * 4
    assert store.has(OTHER_ROOT, hashes(ours), False) == [False] * 4
    assert store.counters.misses["wrong_root"] == 4
    assert store.erase(OTHER_ROOT, hashes(ours)) == 0
    assert get(store, ours) == as_put(ours)
    assert get(store, ours, root=bytes(16)) == [None] * 4, "a root nobody knows"


def test_a_block_that_is_not_what_it_says_is_refused() -> None:
    store, (one,) = a_store(), chain(1)
    lies = {
        "not_genuine": replace(one.header, hash=OTHER_ROOT),
        "malformed": replace(one.header, raw_bytes=one.header.length + 1),
        "too_large": replace(one.header, length=10**6, raw_bytes=10**6),
    }
    for why, header in lies.items():
        assert store.reserve(header) is None
        assert store.counters.refused[why] == 1, why
    assert store.reserve(replace(one.header, ids=one.header.ids[:8])) is None
    assert store.counters.refused["not_genuine"] == 2
    assert len(store.table.resident) == 0
    assert store.table.memory.used_bytes == 0


def test_a_buffer_is_committed_as_what_it_was_reserved_for() -> None:
    store, (one, other) = a_store(), chain(2)
    buffer = store.reserve(one.header)
    assert buffer is not None
    with pytest.raises(ValueError, match="not reserved"):
        store.commit(other.header, buffer)
    with pytest.raises(ValueError, match="not reserved"):
        store.commit(one.header, memoryview(bytearray(1024)))
    buffer[:] = one.payload
    assert store.commit(one.header, buffer)
    with pytest.raises(ValueError, match="not reserved"):
        store.commit(one.header, buffer)
    store.check_integrity()


# ---------------------------------------------------------------------------------------------- room


def test_the_bound_holds_and_counts_everything() -> None:
    store = a_store(8.9)
    put(store, *chain(100))
    assert len(store.table.resident) == 8
    assert store.table.memory.used_bytes <= store.table.memory.max_bytes
    sizes = (100, 5000, 300_000, 64, 2_000_000)
    big = VaultStore(3_000_000)
    for number in range(60):
        put(big, block(ROOT, 4 * number, size=sizes[number % 5]))
        assert big.table.memory.used_bytes <= big.table.memory.max_bytes
    assert big.counters.stored_total == 60


def test_of_a_chain_the_end_goes_first() -> None:
    store, long = a_store(8), chain(8)
    put(store, *long)
    put(store, *chain(3, first_id=1000))
    assert get(store, long) == [*as_put(long[:5]), None, None, None]


def test_the_chain_used_last_stays() -> None:
    store = a_store(8)
    old, young = chain(4), chain(4, first_id=500)
    put(store, *old, *young)
    get(store, old)
    put(store, *chain(2, first_id=900))
    assert get(store, old) == as_put(old)
    assert get(store, young) == [*as_put(young[:2]), None, None]


def test_of_what_is_used_together_the_first_stays_longest() -> None:
    store, blocks = a_store(4), [block(ROOT, 100 * number) for number in range(4)]
    put(store, *blocks)
    get(store, blocks)
    put(store, block(ROOT, 900), block(ROOT, 950))
    assert get(store, blocks) == [*as_put(blocks[:2]), None, None]


def test_what_is_being_sent_stays_where_others_may_go() -> None:
    store, blocks = a_store(4), [block(ROOT, 100 * number) for number in range(4)]
    put(store, *blocks)
    served = store.get(ROOT, hashes(blocks[:1]), False)
    get(store, blocks[1:])
    put(store, *(block(ROOT, 900 + 50 * number) for number in range(3)))
    assert store.has(ROOT, hashes(blocks), False) == [True, False, False, False]
    served.release()
    assert store.counters.evictions_total == 3


def test_asking_whether_it_is_there_is_a_use() -> None:
    store = a_store(2)
    first, second = block(ROOT, 0), block(ROOT, 100)
    put(store, first, second)
    store.has(ROOT, [first.hash], False)
    put(store, block(ROOT, 200))
    assert store.has(ROOT, hashes([first, second]), False) == [True, False]


def test_a_fork_is_kept_as_long_as_one_branch_is() -> None:
    store, trunk = a_store(6), chain(2)
    left, right = (block(trunk[-1].hash, first) for first in (100, 200))
    put(store, *trunk, left, right)
    get(store, [*trunk, right])
    put(store, *chain(3, first_id=900))
    assert get(store, [*trunk, right]) == as_put([*trunk, right])
    assert get(store, [left]) == [None]


def test_what_is_being_sent_is_not_overwritten() -> None:
    store, blocks = a_store(4), chain(4)
    put(store, *blocks)
    served = store.get(ROOT, hashes(blocks), False)
    others = chain(4, first_id=900)
    assert put(store, *others) == [False] * 4
    assert store.counters.refused["no_room"] == 4
    assert [bytes(one[1]) for one in served.blocks if one] == [one.payload for one in blocks]
    assert store.erase(ROOT, hashes(blocks)) == 4
    assert get(store, blocks) == [None] * 4
    assert put(store, *others) == [False] * 4, "erased, but the bytes are still being sent"
    assert [bytes(one[1]) for one in served.blocks if one] == [one.payload for one in blocks]
    served.release()
    served.release()
    assert put(store, *others) == [True] * 4


def test_a_block_that_can_never_fit_evicts_nobody() -> None:
    store, blocks = a_store(4), chain(4)
    put(store, *blocks)
    served = store.get(ROOT, hashes(blocks[:3]), False)
    assert put(store, block(ROOT, 900, size=3000)) == [False]
    served.release()
    assert get(store, blocks) == as_put(blocks)


def test_memory_of_one_size_is_had_for_another() -> None:
    store = VaultStore(20 * ONE)
    put(store, *chain(20))
    large = chain(2, first_id=900, size=8000)
    assert put(store, *large) == [True, True]
    assert get(store, large) == as_put(large)
    put(store, *chain(20, first_id=5000))
    assert len(store.table.resident) > 10


# ---------------------------------------------------------------------------------------------- erase


def test_what_others_continue_is_not_erased() -> None:
    store, trunk = a_store(8), chain(3)
    branch = block(trunk[1].hash, 700)
    put(store, *trunk, branch)
    assert store.erase(ROOT, hashes(trunk)) == 1
    assert get(store, trunk) == [*as_put(trunk[:2]), None]
    assert store.erase(ROOT, [*hashes(trunk), branch.hash]) == 3, "deepest first, whatever the order"
    assert len(store.table.resident) == 0
    assert store.counters.erased_total == 4
    assert store.erase(ROOT, hashes(trunk)) == 0
    removed = [change.hash for change in store.take_changes() if change.removed]
    assert removed.index(trunk[1].hash) < removed.index(trunk[0].hash)


def test_a_block_that_is_erased_while_it_arrives_does_not_come() -> None:
    store, (one,) = a_store(), chain(1)
    buffer = store.reserve(one.header)
    assert buffer is not None
    assert store.erase(ROOT, [one.hash]) == 0
    assert not store.commit(one.header, buffer)
    assert store.counters.refused["erased"] == 1
    assert get(store, [one]) == [None]
    assert put(store, one) == [True]


# ---------------------------------------------------------------------------------------------- memory errs


def test_bytes_that_memory_did_not_keep_are_a_miss_and_can_be_put_again() -> None:
    now = [0.0]
    store, blocks = a_store(clock=lambda: now[0], check_after_s=60.0), chain(3)
    put(store, *blocks)
    store.table.resident[blocks[1].hash].view[17] ^= 1
    now[0] = 59.0
    assert None not in get(store, blocks), "checked when it came: whoever fetches it finds out"
    now[0] = 61.0
    found = get(store, blocks)
    assert found == [as_put(blocks)[0], None, as_put(blocks)[2]]
    assert store.counters.damaged_total == 1
    assert put(store, blocks[1]) == [True]
    assert get(store, blocks) == as_put(blocks)


def test_a_damaged_block_that_two_are_sending() -> None:
    store, (one,) = a_store(1, check_after_s=0.0), chain(1)
    put(store, one)
    served = store.get(ROOT, [one.hash], False)
    store.table.resident[one.hash].view[0] ^= 1
    assert get(store, [one]) == [None]
    assert put(store, one) == [False], "its buffer is still being sent"
    served.release()
    assert put(store, one) == [True]
