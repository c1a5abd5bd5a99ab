"""What a vLLM worker keeps below vLLM: blocks that vLLM saves are listed under our hashes, written to vaults, and told
to the vLLM that reads them, never before they are here and never once they may be something else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_remote import Faults, MemoryRemote

from kvfleet.worker.blocks.chain_location import ChainLocation, Finding, names_of
from kvfleet.worker.blocks.pool_integrity import check_integrity
from kvfleet.worker.network.lending import HostLender, PeerStore
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.port.tenant_costs import TenantAccount
from kvfleet.worker.text.context_window import ContextWindow
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks
from kvfleet.worker.vllm.restore_checks import RestoreChecks
from kvfleet.worker.vllm.shared_slots import SharedMemory, SharedSlots
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvfleet.worker.vllm.vllm_tiers import VllmTiers
from kvfleet.worker.vllm_backend import OpaqueFormat
from kvfleet_vllm.wire import BlocksRead, BlocksSaved, BlocksSaving, EngineStep
from kvproto.block_hash import chain, in_tier
from kvproto.messages import GenerateRequest, HotChain, Sampling, Tier, TierEvents
from kvservice.event_log import EventLog
from tests.support.waiting import LIMIT_S

SIZE, BYTES = 16, 64
ROOT = b"r" * 16
PROMPT = list(range(100))


class Rig:
    """The tiers, and vLLM as far as they see it: it saves and reads by the orders of `prepare`."""

    def __init__(
        self,
        folder: Path,
        slots: int = 64,
        ranks: int = 1,
        faults: Faults | None = None,
        sampled: int = 1_000_000,
        block_bytes: int = BYTES,
        prefill_s: float = 1.0,  # for 1000 tokens
    ) -> None:
        self.remote = MemoryRemote(block_bytes, faults=faults)
        self.granted: list[int] = []
        self.is_there = True
        self.changes: list[TierEvents] = []
        self.memory = SharedMemory(folder / "kv", slots * block_bytes)
        host = HostTier(self.memory.view, block_bytes, SIZE)
        store = SharedSlots(self.memory, host, ranks, self._grant, self.changes.extend)
        self.blocks = ForeignBlocks(SIZE)
        rates = StepRates()
        for now in (1.0, 2.0):
            rates.observe(EngineStep(prefill_s, 1, 1000, 1000, ()), now)
        remote: Any = self.remote
        self.wrong: list[bytes] = []
        checks = RestoreChecks("float32", sampled)
        self.tiers = VllmTiers(store, self.blocks, rates, remote, lambda worker: None, b"", checks, self.wrong.append)
        self.number = 0

    def _grant(self, slots: Sequence[int]) -> bool:
        self.granted += slots if self.is_there else []
        return self.is_there

    def sequence(self, ids: Sequence[int] = PROMPT, *, found: int = 0, exact: bool = False) -> VllmSequence:
        """`found` blocks are in vaults."""
        location = None
        if found:
            location = ChainLocation(names_of(ROOT, chain(ROOT, ids, SIZE), ids, SIZE), Finding(True, found))
        spec = SequenceSpec("r", 0, tuple(ids), Sampling(50), ROOT, exact=exact, location=location)
        text: Any = None
        made = VllmSequence(
            spec, window=ContextWindow(0, 50), stop_ids=frozenset(), text=text, siblings=[], arrival=0,
            enqueued=time.monotonic(), account=TenantAccount(),
        )  # fmt: skip
        self.number += 1
        made.name = f"v{self.number}"
        return made

    def save(self, name: str, at: int, count: int, *, ranks: int = 1) -> tuple[int, ...]:
        """As vLLM does: each slot has bytes that say which block it is."""
        slots = tuple(self.granted[:count])
        del self.granted[:count]
        for number, slot in enumerate(slots, at):
            self.tiers.host.view(slot)[:] = bytes([number + 1]) * self.tiers.host.block_bytes
        self.tiers.on_move(BlocksSaving(name, at, slots))
        for _ in range(ranks):
            self.tiers.on_move(BlocksSaved(name, slots))
        return slots

    def bytes_at(self, told: dict[str, Any]) -> list[int]:
        return [self.tiers.host.view(slot)[0] for slot in told["restore"]["slots"]]

    async def written(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.tiers.settled()

    def check(self) -> None:
        pool, store = self.tiers.host.pool, self.tiers.store
        store.told()
        held = [[*one.chain, *one.fetched] for one in self.tiers._held.values()]
        own = [[slot] for slots in store._saving for slot in slots]
        check_integrity(pool, [*held, *own, [*store._granted], [*store._doubtful]])
        log = EventLog("e")
        log.note(self.changes)
        log.flush(0.0)
        assert log.digest == self.tiers.digest == in_tier(log.plain_digest, Tier.HOST.number)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.check()
    rig.remote.close()


async def saved(rig: Rig, ids: Sequence[int] = PROMPT, blocks: int = 6) -> VllmSequence:
    sequence = rig.sequence(ids)
    told = await rig.tiers.prepare(sequence)
    assert told["save_from"] == 0
    rig.save(sequence.name, 0, blocks)
    return sequence


async def test_what_vllm_saves_is_listed_and_told_to_the_next(rig: Rig) -> None:
    told = await rig.tiers.prepare(rig.sequence())
    assert "restore" not in told
    assert told["store"] == {"path": str(rig.memory.path), "slots": 64, "block_tokens": SIZE}
    sequence = await saved(rig)
    assert rig.tiers.holdings() == {Tier.HOST: chain(ROOT, PROMPT, SIZE)}
    rig.tiers.over(sequence.name)
    again = rig.sequence()
    told = await rig.tiers.prepare(again)
    assert told["save_from"] == 6
    assert told["restore"]["at"] == 0
    assert rig.bytes_at(told) == [1, 2, 3, 4, 5, 6]
    rig.tiers.on_move(BlocksRead(again.name, 5, 1e-3))
    assert rig.tiers.restored(again.name, 96) == {Tier.HOST: 96}, "vLLM tells so after it has read"


async def test_a_slow_copy_from_the_host_is_not_worth_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, block_bytes=1 << 16)
    await saved(rig)
    reading = rig.sequence()
    assert "restore" in await rig.tiers.prepare(reading)
    assert await rig.tiers.rates() == {"vault": rig.remote.bytes_per_s}
    rig.tiers.on_move(BlocksRead(reading.name, 6, 60.0))
    assert (await rig.tiers.rates())["host"] == pytest.approx(6 * (1 << 16) / 60)
    assert "restore" not in await rig.tiers.prepare(rig.sequence())
    rig.check()
    rig.remote.close()


async def test_vllm_has_a_slot_for_each_block_of_the_prompts_that_it_computes(rig: Rig) -> None:
    await rig.tiers.prepare(rig.sequence(range(240)))
    assert len(rig.granted) == 15 + 8
    await rig.tiers.prepare(rig.sequence(range(1000, 1160)))
    assert len(rig.granted) == 25 + 8
    await rig.tiers.prepare(rig.sequence(range(2000, 2480)))
    assert len(rig.granted) == 32 + 8, "half of all, and some"


async def test_not_all_of_a_prompt_is_read(rig: Rig) -> None:
    """vLLM has to compute one token at least."""
    await saved(rig, PROMPT[:96])
    told = await rig.tiers.prepare(rig.sequence(PROMPT[:96]))
    assert rig.bytes_at(told) == [1, 2, 3, 4, 5]


async def test_another_tenant_finds_nothing(rig: Rig) -> None:
    await saved(rig)
    other = rig.sequence()
    other.root = b"o" * 16
    assert "restore" not in await rig.tiers.prepare(other)


async def test_what_is_read_stays_until_all_ranks_have_read_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=16, ranks=2)
    sequence = rig.sequence(PROMPT[:40])
    await rig.tiers.prepare(sequence)
    slots = rig.save(sequence.name, 0, 2, ranks=1)
    assert rig.tiers.holdings() == {Tier.HOST: []}, "one rank's part is missing"
    rig.tiers.on_move(BlocksSaved(sequence.name, slots))
    assert len(rig.tiers.holdings()[Tier.HOST]) == 2
    reading = rig.sequence(PROMPT[:40])
    told = await rig.tiers.prepare(reading)
    rig.tiers.on_move(BlocksRead(reading.name, 5, 1e-3))
    rig.tiers.host.pool.release(rig.tiers.host.allocate(16))  # all that can be had
    assert rig.bytes_at(told) == [1, 2]
    rig.tiers.on_move(BlocksRead(reading.name, 5, 1e-3))
    rig.tiers.host.pool.release(rig.tiers.host.allocate(16))
    assert rig.tiers.holdings() == {Tier.HOST: []}
    rig.check()
    rig.remote.close()


async def test_outputs_that_are_still_on_their_way_are_waited_for(rig: Rig) -> None:
    sequence = rig.sequence(PROMPT[:30])
    await rig.tiers.prepare(sequence)
    rig.save(sequence.name, 0, 2)
    assert rig.tiers.holdings() == {Tier.HOST: []}
    sequence.outputs += [7, 8]
    async with asyncio.timeout(LIMIT_S):
        while not rig.tiers.holdings()[Tier.HOST]:
            await asyncio.sleep(0.01)
    assert rig.tiers.holdings() == {Tier.HOST: chain(ROOT, [*PROMPT[:30], 7, 8], SIZE)}


async def test_a_chain_has_no_gap(rig: Rig) -> None:
    sequence = rig.sequence()
    await rig.tiers.prepare(sequence)
    rig.save(sequence.name, 2, 2)
    assert rig.tiers.holdings() == {Tier.HOST: []}


async def test_vaults_keep_what_is_saved_and_give_it_to_another_worker(rig: Rig, tmp_path: Path) -> None:
    sequence = await saved(rig)
    hashes = chain(ROOT, PROMPT, SIZE)
    rig.tiers.keep(hashes)
    await rig.written()
    assert list(rig.remote.kept[Tier.VAULT]) == hashes
    rig.tiers.over(sequence.name)

    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "other")
    other.remote.kept = rig.remote.kept
    reading = other.sequence(found=6)
    told = await other.tiers.prepare(reading)
    assert other.bytes_at(told) == [1, 2, 3, 4, 5, 6]
    assert told["save_from"] == 6, "the host has them now"
    assert other.tiers.restored(reading.name, 96) == {Tier.VAULT: 96}
    loads = other.tiers.loads()
    assert loads["vault"].hit_tokens_total == 96
    other.check()
    other.remote.close()


async def test_another_workers_host_gives_what_it_saved(rig: Rig, tmp_path: Path) -> None:
    """By the store that serves peers, and ahead of the request as well."""
    await saved(rig)
    hashes, names = chain(ROOT, PROMPT, SIZE), names_of(ROOT, chain(ROOT, PROMPT, SIZE), PROMPT, SIZE)
    lender = HostLender(rig.tiers.host, OpaqueFormat(bytes(16), (BYTES // 4, 1, "float32")))
    assert PeerStore(lender, lambda work: work(None)).has(ROOT, hashes, False) == [True] * 6
    served = PeerStore(lender, lambda work: work(None)).get(ROOT, hashes, False)
    given = [block for block in served.blocks if block is not None]
    assert [bytes(payload)[0] for _, payload in given] == [1, 2, 3, 4, 5, 6]
    assert lender.lent
    served.release()
    assert not lender.lent
    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "other")
    for name, (_, payload) in zip(names, given, strict=True):
        other.remote.kept[Tier.PEER][name.hash] = name, bytes(payload), False
    reading = other.sequence()
    reading.spec = replace(reading.spec, location=ChainLocation(names, Finding(True, 0, 6), "p", handed_over=True))
    told = await other.tiers.prepare(reading)
    assert other.bytes_at(told) == [1, 2, 3, 4, 5, 6]
    assert other.tiers.restored(reading.name, 96) == {Tier.PEER: 96}
    other.check()
    other.remote.close()


async def test_blocks_of_another_worker_come_ahead(tmp_path: Path) -> None:
    names = names_of(ROOT, chain(ROOT, PROMPT, SIZE), PROMPT, SIZE)
    rig = Rig(tmp_path)
    for name in names[:4]:
        rig.remote.kept[Tier.PEER][name.hash] = name, bytes(BYTES), False
    assert await rig.tiers.at_peer(names, "p", LIMIT_S) == 4
    await rig.tiers.preload(HotChain(b"".join(one.hash for one in names[:4]), ROOT, source="p"), LIMIT_S)
    assert rig.tiers.depths([one.hash for one in names]) == {Tier.HOST: 4}
    rig.check()
    rig.remote.close()


async def test_what_vaults_lose_meanwhile_is_computed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, faults=Faults(lost=1.0))
    told = await rig.tiers.prepare(rig.sequence(found=6))
    assert "restore" not in told
    rig.check()
    rig.remote.close()


@pytest.mark.parametrize(("block_s", "came"), [(0.1, 6), (0.25, 1)])
async def test_a_late_restore_goes_on_if_it_ends_well_before_the_blocks_were_computed(
    rig: Rig, tmp_path: Path, block_s: float, came: int
) -> None:
    """Computing takes 2 s, of which a restore may take 0.4 s in any case."""
    await saved(rig)
    rig.tiers.keep(chain(ROOT, PROMPT, SIZE))
    await rig.written()
    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "other", faults=Faults(stall=1.0, stall_s=block_s), prefill_s=20.0)
    other.remote.kept = rig.remote.kept
    told = await other.tiers.prepare(other.sequence(found=6))
    assert other.bytes_at(told) == [1, 2, 3, 4, 5, 6][:came]
    other.check()
    other.remote.close()


async def test_what_lies_behind_a_gap_is_no_use(rig: Rig) -> None:
    await saved(rig)
    hashes = chain(ROOT, PROMPT, SIZE)
    rig.tiers.keep(hashes)
    await rig.written()
    rig.remote.kept[Tier.VAULT].pop(hashes[3])
    rig.tiers.host.pool.release(rig.tiers.host.allocate(64))  # the host's are evicted
    told = await rig.tiers.prepare(rig.sequence(found=6))
    assert rig.bytes_at(told) == [1, 2, 3]


async def test_what_the_device_has_is_not_brought(rig: Rig) -> None:
    await saved(rig)
    salt = ROOT.hex()
    rig.blocks.apply(
        [{"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None, "token_ids": PROMPT[:96],
          "block_size": 32, "extra_keys": [[salt], None, None]}]
    )  # fmt: skip
    assert "restore" not in await rig.tiers.prepare(rig.sequence())


async def test_a_session_is_erased_here_and_in_vaults(rig: Rig) -> None:
    await saved(rig)
    hashes = chain(ROOT, PROMPT, SIZE)
    rig.tiers.keep(hashes)
    await rig.written()
    assert rig.tiers.erase(ROOT, hashes, PROMPT, 32) == 4
    assert rig.tiers.holdings() == {Tier.HOST: hashes[:2]}
    assert list(rig.remote.kept[Tier.VAULT]) == hashes[:2]


async def test_slots_that_a_silent_vllm_may_write_to_are_not_used(rig: Rig) -> None:
    await rig.tiers.prepare(rig.sequence())
    granted, host = set(rig.granted), rig.tiers.host
    rig.tiers.away()
    others = host.allocate(64)
    assert granted.isdisjoint(others)
    rig.tiers.back()
    assert granted == set(host.allocate(64))
    host.pool.release([*others, *granted])


async def test_a_vllm_that_is_not_there_is_granted_nothing(rig: Rig) -> None:
    rig.is_there = False
    await rig.tiers.prepare(rig.sequence())
    assert not rig.tiers.store._granted
    rig.is_there = True
    await saved(rig)


async def test_a_request_that_left_before_its_blocks_came_holds_nothing_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfleet.worker.vllm.vllm_tiers.READ_S", 0.0)
    await saved(rig)
    reading = rig.sequence()
    await rig.tiers.prepare(reading)
    rig.tiers.over(reading.name)
    await asyncio.sleep(0.01)
    assert not rig.tiers._held


async def kept(folder: Path, blocks: int = 6) -> Rig:
    """One whose vaults have the prompt, and which checks every restore; none is late, on a busy machine either."""
    rig = Rig(folder, sampled=1, prefill_s=100.0)
    await saved(rig, blocks=blocks)
    rig.tiers.keep(chain(ROOT, PROMPT, SIZE)[:blocks])
    await rig.written()
    rig.tiers.host.pool.release(rig.tiers.host.allocate(64))  # the host's are evicted
    return rig


async def test_the_last_block_of_a_sampled_restore_is_computed_and_compared(tmp_path: Path) -> None:
    rig = await kept(tmp_path)
    reading = rig.sequence(found=6)
    told = await rig.tiers.prepare(reading)
    assert rig.bytes_at(told) == [1, 2, 3, 4, 5]
    assert told["save_from"] == 5
    assert rig.tiers.restored(reading.name, 80) == {Tier.VAULT: 80}
    rig.save(reading.name, 5, 1)
    assert rig.wrong == rig.remote.distrusted == []
    assert len(rig.tiers.holdings()[Tier.HOST]) == 6
    rig.tiers.on_move(BlocksRead(reading.name, 5, 1e-3))
    rig.check()
    rig.remote.close()


async def test_a_wrong_block_goes_everywhere_and_its_vault_is_distrusted(tmp_path: Path) -> None:
    rig = await kept(tmp_path)
    hashes = chain(ROOT, PROMPT, SIZE)
    name, payload, lossy = rig.remote.kept[Tier.VAULT][hashes[5]]
    rig.remote.kept[Tier.VAULT][hashes[5]] = name, payload[:-1] + b"\x40", lossy  # its checksum is right
    reading = rig.sequence(found=6)
    await rig.tiers.prepare(reading)
    rig.tiers.on_move(BlocksRead(reading.name, 5, 1e-3))
    rig.save(reading.name, 5, 1)
    assert rig.remote.distrusted == ["vault1"]
    assert rig.wrong == [hashes[0]], "all that came with it"
    assert rig.remote.kept[Tier.VAULT] == {}
    assert rig.tiers.holdings() == {Tier.HOST: []}
    rig.check()
    again = await rig.tiers.prepare(rig.sequence(found=6))
    assert "restore" not in again
    rig.remote.close()


async def test_a_wrong_block_of_the_host_is_no_vaults_fault(tmp_path: Path) -> None:
    rig = Rig(tmp_path, sampled=1)
    await saved(rig)
    hashes = chain(ROOT, PROMPT, SIZE)
    reading = rig.sequence()
    told = await rig.tiers.prepare(reading)
    assert rig.bytes_at(told) == [1, 2, 3, 4, 5]
    rig.tiers.on_move(BlocksRead(reading.name, 5, 1e-3))
    rig.tiers.host.view(rig.tiers.host.pool.chain_to(hashes)[5])[:] = b"\xff" * BYTES  # no numbers
    rig.save(reading.name, 5, 1)
    assert rig.remote.distrusted == []
    assert rig.wrong == [hashes[0]]
    assert rig.tiers.loads()["host"].failures_total == {"wrong": 1}
    rig.check()
    rig.remote.close()


async def test_a_sampled_restore_of_one_block_brings_nothing(tmp_path: Path) -> None:
    rig = await kept(tmp_path, blocks=1)
    told = await rig.tiers.prepare(rig.sequence(found=1))
    assert told["save_from"] == 0
    assert not told.get("restore", {}).get("slots")
    assert not rig.tiers._held
    rig.check()
    rig.remote.close()


async def test_what_is_never_asked_for_again_is_not_saved_until_some_is(rig: Rig) -> None:
    """A workload without reuse must not pay for tiers. Another tenant's is another one."""

    async def ask(number: int, root: bytes = ROOT) -> bool:
        sequence = rig.sequence([number, *range(16_000)])
        sequence.root = root
        told = await rig.tiers.prepare(sequence)
        rig.tiers.read(sequence.name)
        return "save_from" in told

    assert await ask(0)
    assert not all([await ask(number) for number in range(1, 12)])
    assert await ask(0, b"o" * 16)
    assert await ask(11), "a tenth of all is not next to nothing"


async def test_a_question_may_take_a_share_of_what_it_may_save(rig: Rig) -> None:
    request = GenerateRequest("r", 0, "demo", Sampling(9), "_ing.x.b", prompt_ids=(1,))
    location = rig.tiers.locate(request, ROOT, tuple(range(20_000)), {}, "")(0)
    assert location is not None
    assert location.look_s == pytest.approx(0.2)
