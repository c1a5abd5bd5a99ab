"""Blocks of a real vLLM in host memory and a real vault: they come back as they were, or are computed again, and the
text is the same whichever it was."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvfleet.vault.store.pools import VaultPools
from kvfleet.vault.store.store import VaultStore
from kvfleet.worker.blocks.block_codec import BlockShape
from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvfleet.worker.vllm.engine_beside import engine_beside
from kvfleet.worker.vllm.restore_checks import RestoreChecks
from kvfleet.worker.vllm.result_queue import ResultQueue
from kvfleet.worker.vllm.shared_slots import SharedMemory, SharedSlots
from kvfleet.worker.vllm.state_links import StateLinks, form_of
from kvfleet.worker.vllm.state_records import StateRecords
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_engine import VllmEngine
from kvfleet.worker.vllm.vllm_news import LOST_S
from kvfleet.worker.vllm.vllm_sequence import Sockets, VllmSequence
from kvfleet.worker.vllm.vllm_server import Expected
from kvfleet.worker.vllm.vllm_server import VllmServer as VllmSide
from kvfleet.worker.vllm.vllm_tiers import VllmTiers
from kvproto.block_hash import chain
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer
from kvproto.errors import EngineFailure
from kvproto.messages import Tier
from tests.engines.rigs import EngineRig, Recorder, Stream, greedy, sampled
from tests.support.vllm_server import VllmServer
from tests.support.waiting import LIMIT_S, PAUSE_S, until

BLOCK, SLOTS = 32, 128
PROMPT, WHOLE = 1000, 992  # tokens
KEYS = KeyRing({"first": b"k" * 32})


class TiersRig(EngineRig):
    """A worker's side of vLLM with tiers, beside a vault."""

    tiers: VllmTiers
    vllm: VllmEngine

    def hashes(self, prompt: tuple[int, ...]) -> list[bytes]:
        return chain(self.root, prompt, BLOCK)

    async def computed(self, request: str, prompt: tuple[int, ...], way: Callable[..., object] = greedy) -> Stream:
        """A first time. Host and vault have all its blocks afterwards."""
        first = await self.run(self.spec(request, prompt, way(24)))
        assert first.cached_tokens == 0
        hashes = self.hashes(prompt)
        await until(lambda: self.tiers.host.depth(hashes, 0, len(hashes)) == len(hashes))
        self.tiers.keep(hashes)
        await self.tiers.settled()
        return first

    async def off_device(self, prompt: tuple[int, ...]) -> None:
        """Once vLLM has told of its blocks, and then of their end; on a busy machine that is late."""
        async with asyncio.timeout(LIMIT_S):
            while (await self.engine.inspect(self.root, prompt)).tiers.get("device", 0) < WHOLE:
                await asyncio.sleep(PAUSE_S)
            self.vllm.discard(self.hashes(prompt)[0])
            while (await self.engine.inspect(self.root, prompt)).cached_tokens:
                await asyncio.sleep(PAUSE_S)

    def off_host(self) -> None:
        pool = self.tiers.host.pool
        while pool.index.hashes():  # each time what recurrent states held is free
            pool.release(self.tiers.host.allocate(pool.available))

    def from_vault(self, spec: SequenceSpec) -> SequenceSpec:
        """As one that was handed over, so that it counts as dear to compute, and whose answers are waited for."""
        assert self.tiers.links is not None
        names = names_of(self.root, self.hashes(spec.prompt_ids), spec.prompt_ids, BLOCK)
        finding = self.tiers.links.look(names, exact=False, peer="", on_ready=lambda: None, limit_s=LIMIT_S)
        return replace(spec, location=ChainLocation(names, finding, look_s=LIMIT_S, handed_over=True))


Starts = Callable[..., Awaitable[TiersRig]]


@pytest.fixture
async def starts(vllm_server: VllmServer, tiny_llama: Path, tmp_path: Path) -> AsyncIterator[Starts]:
    rigs: list[TiersRig] = []

    async def start(sampled: int = 1_000_000) -> TiersRig:
        rigs.append(await beside(vllm_server.url, tiny_llama, tmp_path, sampled))
        return rigs[-1]

    yield start
    for rig in rigs:
        await rig.close()


async def beside(url: str, model: Path, folder: Path, sampled: int) -> TiersRig:
    bundle = read_bundle(model, "tiny", load_format="auto", dtype="auto", block_size=BLOCK)
    recorder, tokenizer = Recorder(), Tokenizer.from_str(bundle.tokenizer_json)
    sockets, fatal = Path(tempfile.mkdtemp(prefix="kvfleet-")), list[str]()
    where = Sockets(str(sockets / "n"), str(sockets / "d"))
    side = VllmSide(TokenRoutes(url), where, Expected(BLOCK, None, "auto"), fatal.append)
    await side.open()
    facts = await side.find()
    assert facts.moved is not None
    pools = VaultPools(VaultStore(1 << 28), VaultStore(1 << 28))
    vault = DataPlaneServer(pools, KEYS, "v1", unix_path=sockets / "v")
    vault.start()
    shape = BlockShape(facts.moved.nbytes // 4, 1, "float32")
    form = form_of(facts.moved.name, facts.state_slots, facts.moved.nbytes) if facts.has_states else None
    links = RemoteTiers(RemoteSettings("w", "here", facts.moved.name, shape, BlockCodec.RAW, states=form), KEYS)
    links.set_vaults([SourceAddress("v1", "e1", "here", vault.addresses)])
    await until(lambda: links.speed(Tier.VAULT))
    memory = SharedMemory(folder / "kv", SLOTS * facts.moved.nbytes)
    host, rates = HostTier(memory.view, facts.moved.nbytes, BLOCK), StepRates()
    store = SharedSlots(memory, host, facts.moved.ranks, side.news.grant, lambda changes: engine.on_changes(changes))
    states = None
    assert (form is not None) is facts.has_states
    if form is not None:
        store.states = StateRecords(host.pool)
        states = StateLinks(store.states, host, links, form)
    tiers = VllmTiers(
        store, side.blocks, rates, links, lambda worker: None, b"", RestoreChecks(facts.dtype, sampled),
        lambda block: engine.discard(block), states=states, tells_all=len(facts.groups) <= 1,
    )  # fmt: skip
    prefix = f"life{os.urandom(4).hex()}-"
    engine = engine_beside(
        side, facts, tokenizer, bundle.stop_ids, ResultQueue(recorder.take), lambda: None, prefix, tiers, rates
    )
    side.watch(engine)

    async def stop() -> None:
        await engine.stop()
        await side.close()
        links.close()
        vault.close()
        shutil.rmtree(sockets)
        assert not fatal

    rig = TiersRig(
        engine, recorder, tokenizer, bundle.vocab_size, bundle.stop_ids, stop, has_kv=False, block_size=BLOCK
    )
    rig.tiers, rig.vllm = tiers, engine
    return rig


def restored(stream: Stream) -> dict[Tier, int]:
    assert stream.started is not None
    return stream.started.restored


@pytest.mark.parametrize("way", [greedy, sampled])
async def test_from_the_host_and_from_the_vault_the_text_is_the_same(
    starts: Starts, way: Callable[..., object]
) -> None:
    rig = await starts()
    prompt = rig.prompt(PROMPT)
    first = await rig.computed("first", prompt, way)
    await rig.off_device(prompt)
    second = await rig.run(rig.spec("second", prompt, way(24)))
    assert restored(second) == {Tier.HOST: WHOLE}
    await rig.off_device(prompt)
    rig.off_host()
    third = await rig.run(rig.from_vault(rig.spec("third", prompt, way(24))))
    assert restored(third) == {Tier.VAULT: WHOLE}
    assert first.result == second.result == third.result
    assert (await rig.tiers.rates()).keys() == {"host", "vault"}


async def test_another_tenant_finds_nothing(starts: Starts) -> None:
    rig = await starts()
    prompt = rig.prompt(PROMPT)
    await rig.computed("mine", prompt)
    rig.root = rig.other_root
    theirs = await rig.run(rig.from_vault(rig.spec("theirs", prompt, greedy(8))))
    assert (theirs.cached_tokens, restored(theirs)) == (0, {})


async def test_what_is_erased_is_nowhere(starts: Starts) -> None:
    rig = await starts()
    prompt = rig.prompt(PROMPT)
    first = await rig.computed("first", prompt)
    assert await rig.engine.erase(rig.root, [*prompt, *first.ids], 0) >= 2 * (WHOLE // BLOCK)
    again = await rig.run(rig.from_vault(rig.spec("again", prompt, greedy(24))))
    assert (again.cached_tokens, again.result) == (0, first.result)


async def test_a_checked_restore_is_right_and_a_damaged_one_is_noticed(starts: Starts) -> None:
    rig = await starts(sampled=1)
    prompt = rig.prompt(PROMPT)
    first = await rig.computed("first", prompt)
    for number in range(3):
        await rig.off_device(prompt)
        checked = await rig.run(rig.spec(f"checked{number}", prompt, greedy(24)))
        assert restored(checked) == {Tier.HOST: WHOLE - BLOCK}
        assert checked.result == first.result
    assert rig.tiers.loads()["host"].failures_total == {}

    hashes = rig.hashes(prompt)
    slots = rig.tiers.host.pool.chain_to(hashes)
    await rig.off_device(prompt)
    rig.tiers.host.view(slots[7])[:] = os.urandom(rig.tiers.host.block_bytes)
    damaged = await rig.run(rig.spec("damaged", prompt, greedy(500)))
    assert isinstance(damaged.error, EngineFailure)  # so that its reader goes on from right blocks
    await until(lambda: rig.tiers.loads()["host"].failures_total == {"wrong": 1})
    assert rig.tiers.host.depth(hashes, 0, len(hashes)) == 0
    assert (await rig.engine.inspect(rig.root, prompt)).cached_tokens == 0, "when it has forgotten"
    after = await rig.run(rig.from_vault(rig.spec("after", prompt, greedy(24))))
    assert (after.cached_tokens, after.result) == (0, first.result)


async def test_a_load_that_fails_is_computed_and_right(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot of all does not exist: none of them counts, and nothing of such a request is saved."""
    rig = await starts()
    prompt = rig.prompt(PROMPT)
    first = await rig.computed("first", prompt)
    prepare = rig.tiers.prepare

    async def lying(sequence: VllmSequence) -> dict[str, Any]:
        told = await prepare(sequence)
        told["restore"]["slots"] = [*told["restore"]["slots"][:-1], SLOTS]
        told["save_from"] = 0
        return told

    saved = rig.tiers.store.saved_total
    for number in range(3):
        await rig.off_device(prompt)
        monkeypatch.setattr(rig.tiers, "prepare", lying)
        failed = await rig.run(rig.spec(f"failed{number}", prompt, greedy(24)))
        monkeypatch.setattr(rig.tiers, "prepare", prepare)
        assert failed.result == first.result
    await asyncio.sleep(2 * LOST_S)
    await rig.run(rig.spec("other", rig.prompt(40, 2), greedy(4)))  # all of vLLM greets again
    await rig.off_device(prompt)
    again = await rig.run(rig.spec("again", prompt, greedy(24)))
    assert (restored(again), again.result) == ({Tier.HOST: WHOLE}, first.result)
    assert rig.tiers.store.saved_total == saved
