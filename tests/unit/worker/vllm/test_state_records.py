"""States of a hybrid model in a vLLM worker's host memory: restored with the blocks before them, or nothing is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_vllm_tiers import PROMPT, ROOT, SIZE, Rig

from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.blocks.pool_integrity import check_integrity
from kvfleet.worker.network.lending import HostLender, PeerStore
from kvfleet.worker.vllm.state_links import StateLinks, form_of
from kvfleet.worker.vllm.state_records import SHARE, StateRecords
from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvfleet.worker.vllm_backend import OpaqueFormat
from kvfleet_vllm.wire import BlocksRead, BlocksSaved, StateSaving
from kvproto.block_hash import chain, in_tier, state_after
from kvproto.dataplane.block import MAX_BLOCK_BYTES
from kvproto.messages import Tier
from kvservice.event_log import EventLog
from tests.support.waiting import until

SLOTS = 2  # of a state


class HybridRig(Rig):
    def __init__(self, folder: Path, slots: int = 64, sampled: int = 1_000_000) -> None:
        super().__init__(folder, slots, sampled=sampled)
        self.tiers.links = None
        self.tiers.tells_all = False
        self.tiers.store.states = self.states = StateRecords(self.tiers.host.pool)

    def save_state(self, name: str, at: int) -> None:
        slots = tuple(self.granted[:SLOTS])
        del self.granted[:SLOTS]
        for slot in slots:
            self.tiers.host.view(slot)[:] = bytes([100 + at]) * self.tiers.host.block_bytes
        self.tiers.on_move(StateSaving(name, at, slots))
        self.tiers.on_move(BlocksSaved(name, slots))

    async def saved(self, ids: Sequence[int] = PROMPT, blocks: int = 6, states: Sequence[int] = (6,)) -> str:
        sequence = self.sequence(ids)
        await self.tiers.prepare(sequence)
        self.save(sequence.name, 0, blocks)
        for at in states:
            self.save_state(sequence.name, at)
        return sequence.name

    async def told(self, ids: Sequence[int] = PROMPT) -> tuple[list[int], list[int], str]:
        """Which blocks and which states a request brings, and its name."""
        sequence = self.sequence(ids)
        told = await self.tiers.prepare(sequence)
        if "restore" not in told:
            return [], [], sequence.name
        state = [self.tiers.host.view(slot)[0] - 100 for slot in told["restore"]["state"]]
        return self.bytes_at(told), state, sequence.name

    def check(self) -> None:
        pool, store = self.tiers.host.pool, self.tiers.store
        store.told()
        self.states.check_integrity()
        held = [[*one.chain, *one.fetched, *one.state] for one in self.tiers._held.values()]
        own = [[slot] for slots in store._saving for slot in slots]
        kept = [list(slots) for slots in self.states._states.values()]
        check_integrity(pool, [*held, *own, *kept, [*store._granted], [*store._doubtful]])
        log = EventLog("e")
        log.note(self.changes)
        log.flush(0.0)
        assert log.digest == self.tiers.digest
        states = in_tier(self.states.digest, Tier.STATE.number)
        assert self.tiers.digest == in_tier(pool.digest, Tier.HOST.number) ^ states


class LinkedRig(HybridRig):
    """With vaults and a peer. `kept` below: what they have."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tiers.links = remote = self.remote  # type: ignore[assignment]
        form = form_of(bytes(16), SLOTS, self.tiers.host.block_bytes)
        assert form is not None
        self.tiers.states = StateLinks(self.states, self.tiers.host, remote, form, self.tiers._sent)  # type: ignore[arg-type]
        self.kept = self.remote.kept

    async def vaulted(self, states: Sequence[int] = (2, 4)) -> None:
        """Vaults have the prompt and these states, and this host nothing."""
        await self.saved(states=states)
        self.tiers.keep(self.hashes)
        await self.written()
        while self.tiers.holdings()[Tier.HOST]:  # each time what states held is free
            self.tiers.host.pool.release(self.tiers.host.allocate(64))
        assert self.tiers.holdings() == {Tier.HOST: [], Tier.STATE: []}

    @property
    def hashes(self) -> list[bytes]:
        return chain(ROOT, PROMPT, SIZE)

    def sequence(self, ids: Sequence[int] = PROMPT, *, found: int = 0, exact: bool = False) -> VllmSequence:
        """It has asked vaults and the peer."""
        made = super().sequence(ids, exact=exact)
        names = names_of(ROOT, chain(ROOT, ids, SIZE), ids, SIZE)
        finding = self.remote.look(names, exact=exact, peer="w2", on_ready=lambda: None)
        made.spec = replace(made.spec, location=ChainLocation(names, finding, "w2", handed_over=True))
        return made


@pytest.fixture
async def linked(tmp_path: Path) -> AsyncIterator[LinkedRig]:
    rig = LinkedRig(tmp_path)
    yield rig
    rig.check()
    rig.remote.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HybridRig]:
    rig = HybridRig(tmp_path)
    yield rig
    rig.check()
    rig.remote.close()


async def test_blocks_up_to_the_last_state_are_brought_with_it(rig: HybridRig) -> None:
    await rig.saved(states=(2, 4))
    hashes = chain(ROOT, PROMPT, SIZE)
    assert rig.tiers.holdings() == {Tier.HOST: hashes, Tier.STATE: [hashes[1], hashes[3]]}
    blocks, state, name = await rig.told()
    assert (blocks, state) == ([1, 2, 3, 4], [4, 4])
    rig.tiers.on_move(BlocksRead(name, 6, 1e-3))
    assert not rig.tiers._held
    load = rig.tiers.loads()["state"]
    assert (load.blocks, load.offloaded_blocks_total, load.restores_total) == (2, 2, 1)


async def test_a_state_waits_for_its_block_whose_tokens_are_late(rig: HybridRig) -> None:
    """They may come between what is told of the two."""
    sequence = rig.sequence(PROMPT[:30])
    await rig.tiers.prepare(sequence)
    rig.save(sequence.name, 0, 2)
    sequence.outputs += [7, 8]
    rig.save_state(sequence.name, 2)
    hashes = chain(ROOT, [*PROMPT[:30], 7, 8], SIZE)
    await until(lambda: rig.tiers.holdings() == {Tier.HOST: hashes, Tier.STATE: hashes[1:]})


async def test_without_a_state_nothing_is_brought_whatever_blocks_there_are(rig: HybridRig) -> None:
    await rig.saved(states=())
    assert (await rig.told())[:2] == ([], [])


async def test_one_token_is_left_to_compute(rig: HybridRig) -> None:
    await rig.saved(states=(3, 6))
    assert (await rig.told(PROMPT[:96]))[:2] == ([1, 2, 3], [3, 3])


async def test_what_the_device_has_does_not_count(rig: HybridRig) -> None:
    """Of its blocks it is not known whether it has a state behind them."""
    await rig.saved()
    rig.blocks.apply(
        [{"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None, "token_ids": PROMPT[:96],
          "block_size": 32, "extra_keys": [[ROOT.hex()], None, None]}]
    )  # fmt: skip
    assert (await rig.told())[:2] == ([1, 2, 3, 4, 5, 6], [6, 6])


async def test_behind_the_prompt_only_the_last_state_stays(rig: HybridRig) -> None:
    sequence = rig.sequence(PROMPT[:40])
    await rig.tiers.prepare(sequence)
    rig.save(sequence.name, 0, 2)
    rig.save_state(sequence.name, 2)
    for end in range(3, 6):
        sequence.outputs += range(SIZE * (end - 2))[-SIZE:]
        rig.save(sequence.name, end - 1, 1)
        rig.save_state(sequence.name, end)
    hashes = chain(ROOT, [*PROMPT[:40], *sequence.outputs], SIZE)
    assert rig.tiers.holdings()[Tier.STATE] == [hashes[1], hashes[4]]


async def test_a_state_is_kept_once_and_not_without_its_block(rig: HybridRig) -> None:
    name = await rig.saved(blocks=4, states=(4, 4, 5))
    assert rig.tiers.holdings()[Tier.STATE] == chain(ROOT, PROMPT, SIZE)[3:4]
    assert rig.states.saved_total == 1
    rig.tiers.over(name)


async def test_the_least_recently_used_goes_and_each_with_its_block(rig: HybridRig) -> None:
    most = 64 // SHARE // SLOTS
    for number in range(most):
        await rig.saved([number, *PROMPT[:20]], 1, (1,))
    _, state, name = await rig.told([0, *PROMPT[:20]])
    assert state == [1, 1]
    rig.tiers.read(name)
    await rig.saved([most, *PROMPT[:20]], 1, (1,))
    assert rig.states.evictions == 1
    assert (await rig.told([1, *PROMPT[:20]]))[:2] == ([], [])
    assert (await rig.told([0, *PROMPT[:20]]))[1] == [1, 1]
    for name in list(rig.tiers._held):
        rig.tiers.read(name)
    host, taken = rig.tiers.host, list[int]()
    while host.pool.available:  # more of it, as states go
        taken += host.allocate(host.pool.available)
    assert rig.tiers.holdings() == {Tier.HOST: [], Tier.STATE: []}
    host.pool.release(taken)


async def test_what_is_read_stays(rig: HybridRig) -> None:
    await rig.saved()
    sequence = rig.sequence()
    told: Any = await rig.tiers.prepare(sequence)
    rig.states.drop(chain(ROOT, PROMPT, SIZE)[5])
    pool = rig.tiers.host.pool
    pool.release(rig.tiers.host.allocate(pool.available))
    assert {rig.tiers.host.view(slot)[0] for slot in told["restore"]["state"]} == {106}


async def test_a_session_is_erased_with_its_states(rig: HybridRig) -> None:
    await rig.saved(states=(2, 6))
    hashes = chain(ROOT, PROMPT, SIZE)
    assert rig.tiers.erase(ROOT, hashes, PROMPT, 32) == 4
    assert rig.tiers.holdings() == {Tier.HOST: hashes[:2], Tier.STATE: [hashes[1]]}


async def test_restores_with_a_state_are_not_sampled(tmp_path: Path) -> None:
    rig = HybridRig(tmp_path, sampled=1)
    await rig.saved()
    assert (await rig.told())[:2] == ([1, 2, 3, 4, 5, 6], [6, 6])
    rig.check()
    rig.remote.close()


async def test_a_state_goes_to_vaults_with_its_chain_and_comes_back_with_it(linked: LinkedRig) -> None:
    await linked.vaulted()
    record = linked.kept[Tier.VAULT][state_after(linked.hashes[3])]
    assert record[0].parent == linked.hashes[3]
    assert record[1] == bytes([104]) * (SLOTS * linked.tiers.host.block_bytes)
    blocks, state, name = await linked.told()
    assert (blocks, state) == ([1, 2, 3, 4], [4, 4])
    assert linked.tiers.restored(name, 64) == {Tier.VAULT: 64}
    assert linked.tiers.holdings()[Tier.STATE] == [linked.hashes[3]]
    linked.tiers.on_move(BlocksRead(name, 6, 1e-3))
    assert (await linked.told())[:2] == ([1, 2, 3, 4], [4, 4]), "from the host, this time"
    linked.remote.kept[Tier.VAULT].clear()
    linked.tiers.keep(linked.hashes)
    await linked.written()
    assert linked.kept[Tier.VAULT] == {}, "vaults are not sent again what came from there"


async def test_a_peers_state_comes_with_its_blocks(linked: LinkedRig) -> None:
    await linked.vaulted((3, 5))
    linked.kept[Tier.PEER] = linked.kept[Tier.VAULT]
    linked.kept[Tier.VAULT] = {}
    blocks, state, name = await linked.told()
    assert (blocks, state) == ([1, 2, 3, 4, 5], [5, 5])
    assert linked.tiers.restored(name, 80) == {Tier.PEER: 80}


async def test_what_the_host_has_behind_it_is_not_fetched(linked: LinkedRig) -> None:
    await linked.saved(states=(2, 4))
    linked.tiers.keep(linked.hashes)
    await linked.written()
    linked.states.drop(linked.hashes[3])  # the blocks stay
    before = linked.remote.fetched
    blocks, state, name = await linked.told()
    assert (blocks, state) == ([1, 2, 3, 4], [4, 4])
    assert linked.remote.fetched == before + 1, "the state alone"
    assert linked.tiers.restored(name, 64) == {Tier.HOST: 64}


async def test_a_state_that_does_not_come_is_a_miss_and_the_one_before_it_counts(linked: LinkedRig) -> None:
    await linked.vaulted((2, 4))
    asked = linked.sequence()
    del linked.kept[Tier.VAULT][state_after(linked.hashes[3])]
    told = await linked.tiers.prepare(asked)
    assert linked.bytes_at(told) == [1, 2]
    assert len(told["restore"]["state"]) == SLOTS


async def test_without_all_blocks_before_it_a_state_is_not_asked_for(linked: LinkedRig) -> None:
    await linked.vaulted((4,))
    asked = linked.sequence()
    del linked.kept[Tier.VAULT][linked.hashes[1]]
    told = await linked.tiers.prepare(asked)
    assert "restore" not in told
    assert linked.tiers.holdings()[Tier.STATE] == []


async def test_states_that_no_blocks_lead_to_cost_no_try(linked: LinkedRig) -> None:
    """A vault evicts blocks from a chain's end, and states by themselves."""
    await linked.vaulted((2, 4, 5, 6))
    for one in linked.hashes[2:]:
        del linked.kept[Tier.VAULT][one]
    told = await linked.tiers.prepare(linked.sequence())
    assert linked.bytes_at(told) == [1, 2]
    assert len(told["restore"]["state"]) == SLOTS


async def test_what_vaults_lost_is_sent_again(linked: LinkedRig) -> None:
    await linked.saved(states=(2, 4))
    linked.tiers.keep(linked.hashes)
    await linked.written()
    del linked.kept[Tier.VAULT][state_after(linked.hashes[1])]
    linked.tiers.keep(linked.hashes)
    await linked.written()
    assert state_after(linked.hashes[1]) not in linked.kept[Tier.VAULT], "nobody knows yet"
    await linked.tiers.prepare(linked.sequence())
    linked.tiers.keep(linked.hashes)
    await linked.written()
    assert state_after(linked.hashes[1]) in linked.kept[Tier.VAULT]


async def test_a_state_that_vaults_do_not_take_is_offered_again(linked: LinkedRig) -> None:
    await linked.saved(states=(2,))
    linked.remote._faults.refuses = 1.0
    linked.tiers.keep(linked.hashes)
    await linked.written()
    assert linked.kept[Tier.VAULT] == {}
    linked.remote._faults.refuses = 0.0
    linked.tiers.keep(linked.hashes)
    await linked.written()
    assert state_after(linked.hashes[1]) in linked.kept[Tier.VAULT]


async def test_one_too_large_for_a_record_stays_here() -> None:
    assert form_of(bytes(16), 4, MAX_BLOCK_BYTES // 4) is not None
    assert form_of(bytes(16), 4, MAX_BLOCK_BYTES // 4 + 1) is None


async def test_what_is_computed_sooner_is_not_fetched(linked: LinkedRig) -> None:
    await linked.vaulted()
    asked = linked.sequence()
    asked.spec = replace(asked.spec, location=replace(asked.spec.location, handed_over=False))  # type: ignore[type-var]
    linked.remote.bytes_per_s = 1e3
    assert "restore" not in await linked.tiers.prepare(asked)


async def test_what_is_erased_here_is_erased_there(linked: LinkedRig) -> None:
    await linked.saved(states=(2, 4))
    linked.tiers.keep(linked.hashes)
    await linked.written()
    linked.tiers.erase(ROOT, linked.hashes, PROMPT, 0)
    assert linked.kept[Tier.VAULT] == {}
    await linked.saved(states=(2,))
    linked.tiers.keep(linked.hashes)
    await linked.written()
    assert state_after(linked.hashes[1]) in linked.kept[Tier.VAULT], "it is sent anew"


async def test_states_are_lent_under_their_root(linked: LinkedRig) -> None:
    await linked.saved(states=(2, 4))
    assert linked.tiers.states is not None
    host = linked.tiers.host
    lender = HostLender(host, OpaqueFormat(bytes(16), (16, 1, "float32")), linked.tiers.states.lendable)
    store = PeerStore(lender, lambda work: work(None))
    names = [state_after(one) for one in linked.hashes]
    assert store.has(ROOT, names, True) == [False, True, False, True, False, False]
    assert not any(store.has(b"o" * 16, names, True))
    served = store.get(ROOT, [linked.hashes[3], names[3]], True)
    (block, _), (state, payload) = [one for one in served.blocks if one is not None]
    assert (block.is_state, state.is_state, state.parent) == (False, True, linked.hashes[3])
    assert state.format == linked.tiers.states.form.format != block.format
    assert bytes(payload) == bytes([104]) * (SLOTS * host.block_bytes)
    assert len(lender.lent) == 1, "the slots are held while they are sent"
    served.release()
    assert not lender.lent
