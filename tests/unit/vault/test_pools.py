"""A vault's pools of blocks and of states: each is bounded by itself, and what is erased leaves both."""

from __future__ import annotations

import pytest
from test_store import ONE, as_put, get
from test_store import put as put_blocks

from kvfleet.vault.store.pools import VaultPools
from kvfleet.vault.store.store import VaultStore
from tests.support.kv_blocks import OTHER_ROOT, ROOT, Block, chain, hashes, state_of


def pools(blocks: int = 8, states: int = 4) -> VaultPools:
    return VaultPools(VaultStore(blocks * ONE), VaultStore(states * ONE))


def put(store: VaultPools, *blocks: Block) -> list[bool]:
    done = []
    for one in blocks:
        buffer = store.reserve(one.header)
        if buffer is not None:
            buffer[:] = one.payload
        done.append(buffer is not None and store.commit(one.header, buffer))
        store.check_integrity()
    return done


def test_blocks_and_states_come_back_in_the_order_asked_for() -> None:
    store, blocks = pools(), chain(3)
    states = [state_of(blocks[0]), state_of(blocks[2])]
    asked = [blocks[0], states[0], blocks[1], states[1], blocks[2], state_of(blocks[1])]
    assert put(store, *asked[:5]) == [True] * 5
    assert get(store, asked) == [*as_put(asked[:5]), None]  # type: ignore[arg-type]
    assert store.has(ROOT, hashes(asked), False) == [True] * 5 + [False]
    assert get(store, asked, OTHER_ROOT) == [None] * 6  # type: ignore[arg-type]
    assert (len(store.blocks.table.resident), len(store.states.table.resident)) == (3, 2)
    assert (store.blocks.counters.hits_total, store.states.counters.hits_total) == (3, 2)


@pytest.mark.parametrize("many", ["blocks", "states"])
def test_neither_pushes_the_other_out(many: str) -> None:
    store = pools()
    kept = chain(3, first_id=500)
    others = [chain(1, first_id=1000 + 10 * at)[0] for at in range(30)]
    if many == "blocks":
        kept, few, crowded = [state_of(one) for one in kept], store.states, store.blocks
    else:
        others, few, crowded = [state_of(one) for one in others], store.blocks, store.states
    assert put(store, *kept) == [True] * 3
    assert put(store, *others) == [True] * 30
    assert get(store, kept) == as_put(kept)  # type: ignore[arg-type]
    assert few.counters.evictions_total == 0
    assert crowded.counters.evictions_total > 20


def test_a_state_goes_with_its_block_and_stays_while_another_chain_continues_that() -> None:
    store, blocks = pools(), chain(3)
    states = [state_of(one) for one in blocks]
    put(store, *blocks, *states)
    assert store.erase(OTHER_ROOT, hashes([*blocks, *states])) == 0
    assert store.erase(ROOT, hashes([*blocks[:2], *states[:2]])) == 0, "the third block continues them"
    assert get(store, states) == as_put(states)  # type: ignore[arg-type]
    assert store.erase(ROOT, hashes([*blocks[1:], *states[1:]])) == 4
    assert get(store, [*blocks, *states]) == [*as_put(blocks[:1]), None, None, *as_put(states[:1]), None, None]  # type: ignore[arg-type]
    coming = store.reserve(states[2].header)
    assert coming is not None
    store.erase(ROOT, hashes([blocks[2], states[2]]))
    assert not store.commit(states[2].header, coming), "it was erased while its bytes arrived"
    store.check_integrity()


def test_a_state_whose_block_is_erased_while_that_arrives_goes() -> None:
    store, blocks = pools(), chain(1)
    state = state_of(blocks[0])
    assert put(store, state) == [True]
    coming = store.reserve(blocks[0].header)
    assert coming is not None
    assert store.erase(ROOT, hashes([*blocks, state])) == 1
    assert not store.commit(blocks[0].header, coming)
    assert get(store, [*blocks, state]) == [None, None]  # type: ignore[arg-type]


def test_a_vault_of_an_earlier_version_keeps_states_as_blocks_and_erases_them() -> None:
    store, blocks = VaultStore(8 * ONE), chain(2)
    states = [state_of(one) for one in blocks]
    assert put_blocks(store, *blocks, *states) == [True] * 4
    assert get(store, [*blocks, *states]) == as_put([*blocks, *states])
    assert store.erase(ROOT, hashes([*blocks, *states])) == 4
