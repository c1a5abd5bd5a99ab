"""Loop: tiers below a vLLM server: host memory that it shares, and vaults. Owned by the worker's event loop.

    prepare: where is the chain? ──▶ what is worth it comes from vaults to the host ──▶ vLLM is told the slots
    vLLM saves what it computes to the host ──▶ a sequence leaves ──▶ its chain is written to vaults

Nothing is promised to vLLM that is not here, checked and held until vLLM has read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvfleet.worker.blocks.chain_location import BlockName, ChainLocation, Finding, names_of
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.break_even import Offer, RestoredPart
from kvfleet.worker.tiers.link_speed import CopySpeed, LinkSpeed
from kvfleet.worker.tiers.looking_tiers import LookingTiers, blocks_of
from kvfleet.worker.tiers.offloader import ReuseWatch
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import WRONG
from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks
from kvfleet.worker.vllm.host_fetch import fetch_to_host, soon
from kvfleet.worker.vllm.no_tiers import MoveNews, StoreTiers
from kvfleet.worker.vllm.restore_checks import RestoreChecks, SampledRestore
from kvfleet.worker.vllm.shared_slots import AskedChain, SharedSlots
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvfleet_vllm.wire import BlocksSaved, BlocksSaving
from kvproto.block_hash import Root, chain, in_tier, pack_ids
from kvproto.dataplane.block import RUN_BLOCKS
from kvproto.messages import HotChain, Tier, TierLoad

log = logging.getLogger(__name__)

POLL_S = 0.002
SETTLED_POLL_S = 0.02
READ_S = 60.0  # a chain is held for vLLM, which has not said that it has read it
COPY_BYTES_PER_S = 4e9  # between host and device, until vLLM has told
LATE = 1.5  # times the predicted seconds of a fetch, and that share of the seconds of computing
SLACK = 0.2
MOST_KEPT = 65_536  # hashes that vaults were sent


@dataclass(eq=False, slots=True)
class HeldChain:
    """Slots that vLLM reads: `chain` from the beginning as the host has it, then those `fetched` from vaults, the last
    one from `source`."""

    chain: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    source: str = ""
    reads: int = 0  # ranks that have read it


@dataclass(eq=False)
class VllmTiers(LookingTiers, StoreTiers):
    store: SharedSlots
    blocks: ForeignBlocks
    rates_of: StepRates
    links: RemoteTiers | None
    met: Callable[[str], Awaitable[None] | None]
    fleet_key: bytes
    checks: RestoreChecks
    wrong_on_device: Callable[[bytes], None]  # this block, and all that continues it
    _held: dict[str, HeldChain] = field(default_factory=dict)  # by vLLM's name of the request
    _fetched: dict[str, int] = field(default_factory=dict)  # tokens, by the same name
    _kept: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    reuse: ReuseWatch = field(default_factory=ReuseWatch)
    _copies: CopySpeed = field(default_factory=CopySpeed)
    _losses: int = 0
    _wrong: int = 0  # blocks of the host
    _writing: int = 0
    _tokens: Counter[Tier] = field(default_factory=Counter)
    _restores: Counter[Tier] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.host = self.store.host
        self.block_size = self.host.pool.block_size
        self.store.computed_again = self._compare

    # What the worker's loop asks.

    @property
    def remote(self) -> RemoteTiers | None:
        return self.links

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.rates_of.rates.prefill_tokens_per_s

    def wake(self) -> None:
        pass  # `prepare` looks by itself

    @property
    def is_lending(self) -> bool:
        return False

    def meet(self, worker: str) -> Awaitable[None] | None:
        return self.met(worker)

    async def rates(self) -> Mapping[str, float]:
        speed = self.links.speed(Tier.VAULT) if self.links is not None else None
        found = {Tier.HOST: self._copies.bytes_per_s, Tier.VAULT: speed.bytes_per_s if speed is not None else 0.0}
        return {tier.value: rate for tier, rate in found.items() if rate}

    async def preload(self, chain: HotChain, limit_s: float) -> None:
        """To the host."""
        root, hashes = blocks_of(chain)
        start = self.host.depth(hashes, 0, len(hashes))
        if self.links is None or start >= len(hashes):
            return
        names = names_of(root, hashes, (), self.block_size)
        part = RestoredPart(Tier.VAULT, start, len(hashes), limit_s)
        location = ChainLocation(names, Finding(True))
        slots, _ = await fetch_to_host(self.host, self.links, root, hashes, part, location, limit_s, exact=False)
        self.store.told()
        self.host.pool.release(slots)

    async def offer(self, chains: Sequence[HotChain]) -> None:
        for one in chains:
            self.keep(blocks_of(one)[1])
        await self.settled()

    async def settled(self) -> None:
        while self._writing:
            await asyncio.sleep(SETTLED_POLL_S)

    # What the engine asks.

    async def prepare(self, sequence: VllmSequence) -> dict[str, Any]:
        """What vLLM is told of the store with the request: slots to read first, and from where on to save."""
        ids, size, name = sequence.ids, self.block_size, sequence.name
        hashes = chain(sequence.root, ids, size)
        asked = AskedChain(sequence.root, ids, sequence.outputs, len(sequence.outputs), list(hashes))
        usable = (len(ids) - 1) // size  # vLLM computes one token at least
        start = min(self.blocks.depth(hashes), usable)
        self._held[name] = held = HeldChain()
        await self._hold(held, sequence, hashes, start, usable)
        told: dict[str, Any] = {
            "store": {"path": str(self.store.memory.path), "slots": self.host.blocks, "block_tokens": size}
        }
        self.reuse.ask(sequence.root, hashes)
        here = len(self.host.pool.chain_to(hashes))
        if not self.reuse.is_rare(sequence.root):
            told["save_from"] = here
        self.store.asked(name, asked, len(hashes) - here if "save_from" in told else 0)
        slots = held.chain + held.fetched
        if len(slots) > start and self.checks.is_due():
            self._sample(sequence, held, hashes, start)
            told["save_from"] = len(slots) - 1
            slots = slots[:-1]
        if len(slots) > start:
            self._fetched[name] = max(0, len(slots) - len(held.chain)) * size
            told["restore"] = {"at": 0, "slots": slots}
        else:
            self.read(name, self.store.ranks)
        return told

    def restored(self, name: str, tokens: int) -> dict[Tier, int]:
        """Of the tokens that vLLM restores for a request, how many came from which tier."""
        fetched = min(tokens, self._fetched.get(name, 0))
        found = {Tier.VAULT: fetched, Tier.HOST: tokens - fetched}
        found = {tier: count for tier, count in found.items() if count}
        self._tokens.update(found)
        self._restores.update(list(found))
        return found

    def read(self, name: str, by: int = 1) -> None:
        """`by` ranks have read what was held for a request."""
        held = self._held.get(name)
        if held is not None:
            held.reads += by
            if held.reads >= self.store.ranks:
                del self._held[name]
                self.host.pool.release(held.chain + held.fetched)

    def over(self, name: str) -> None:
        """A request has left vLLM, or never came there: it reads no longer than READ_S."""
        self.store.over(name)
        self._fetched.pop(name, None)
        if name in self._held:
            asyncio.get_running_loop().call_later(READ_S, self.read, name, self.store.ranks)

    def away(self) -> None:
        for name in list(self._held):
            self.read(name, self.store.ranks)
        self.store.away()

    def back(self) -> None:
        self.store.back()

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Have vaults keep a chain as far as the host has it, but for what they were sent."""
        self.reuse.extend(hashes)
        if self.links is None:
            return
        if self.links.losses != self._losses:
            self._losses = self.links.losses
            self._kept.clear()
        pool = self.host.pool
        for at, slot in enumerate(pool.chain_to(hashes)):
            if hashes[at] in self._kept:
                continue
            content = pool.index[slot]
            run = hashes[at - at % RUN_BLOCKS]
            name = BlockName(content.root, hashes[at], content.parent, pack_ids(content.ids), run)
            pool.acquire([slot])
            if not self.links.offload(name, self.host.view(slot), lossy=False, on_done=self._written(slot)):
                pool.release([slot])
                return
            self._writing += 1
            self._kept[hashes[at]] = None
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int) -> int:
        gone = self.host.erase(root, hashes, ids, keep)
        self.store.told()
        first = keep // self.block_size
        for one in hashes[first:]:
            self._kept.pop(one, None)
        if self.links is not None and len(hashes) > first:
            self.links.erase(names_of(root, hashes, ids, self.block_size)[first:])
        return gone

    @property
    def digest(self) -> int:
        return in_tier(self.host.pool.digest, Tier.HOST.number)

    def loads(self) -> dict[str, TierLoad]:
        pool, size = self.host.pool, self.host.block_bytes
        loads = {} if self.links is None else {Tier.VAULT.value: TierLoad(), **self.links.loads()}
        loads[Tier.HOST.value] = TierLoad(
            blocks=pool.index.addressed,
            bytes_used=(pool.used + pool.cached) * size,
            bytes_total=pool.num_blocks * size,
            offloaded_blocks_total=self.store.saved_total,
            evictions_total=pool.evictions,
            failures_total={WRONG: self._wrong} if self._wrong else {},
        )
        per_token = size / self.block_size
        for tier, load in list(loads.items()):
            tokens = self._tokens[Tier(tier)]
            loads[tier] = replace(
                load,
                hit_tokens_total=tokens,
                restores_total=self._restores[Tier(tier)],
                restored_bytes_total=int(tokens * per_token),
            )
        return loads

    def on_move(self, told: MoveNews) -> None:
        if isinstance(told, BlocksSaving):
            self.store.on_saving(told)
        elif isinstance(told, BlocksSaved):
            self.store.on_saved(told)
        else:
            self._copies.observe(told.blocks * self.host.block_bytes, told.seconds)
            self.read(told.request)

    def holdings(self) -> dict[Tier, list[bytes]]:
        return {Tier.HOST: self.host.pool.index.hashes()}

    def depths(self, hashes: Sequence[bytes]) -> dict[Tier, int]:
        return {Tier.HOST: self.host.depth(hashes, 0, len(hashes))}

    # Restores.

    async def _hold(
        self, held: HeldChain, sequence: VllmSequence, hashes: Sequence[bytes], start: int, usable: int
    ) -> None:
        """Hold the part of the chain that is cheaper read than computed. `start` blocks are on the device."""
        pool, size, location = self.host.pool, self.block_size, sequence.spec.location
        depth = self.host.depth(hashes, start, usable, exact=sequence.spec.exact)
        copies = LinkSpeed(0.0, self._copies.bytes_per_s or COPY_BYTES_PER_S)
        offers = [Offer(Tier.HOST, depth, copies)]
        if location is not None and self.links is not None and depth < usable and not sequence.start:
            found = await self._found(location)
            offers += break_even.remote_offers(self.links, location, min(found.vault, usable), 0)
        compute_s = break_even.price_of_computing(
            location, lambda one, other: self.rates_of.prompt_seconds(one * size, (other - one) * size)
        )
        parts = break_even.cheapest(offers, start, block_bytes=self.host.block_bytes, compute_s=compute_s)
        for part in parts:
            if part.tier is Tier.HOST:
                held.chain = pool.chain_to(hashes[: part.end])
                pool.acquire(held.chain)
            elif location is not None and self.links is not None and len(held.chain) in (0, part.start):
                if not held.chain:  # what the device has is read from the host too, where it is there
                    held.chain = pool.chain_to(hashes[: part.start])
                    pool.acquire(held.chain)
                if len(held.chain) < part.start:
                    part = part._replace(start=len(held.chain))
                limit_s = LATE * part.seconds + SLACK * compute_s(part.start, part.end)
                exact = sequence.spec.exact
                held.fetched, held.source = await fetch_to_host(
                    self.host, self.links, sequence.root, hashes, part, location, limit_s, exact=exact
                )
                self.store.told()

    async def _found(self, location: ChainLocation) -> Finding:
        clock = asyncio.get_running_loop().time
        until = clock() + break_even.answer_limit_s(location)
        while not location.finding.ready and clock() < until:
            await asyncio.sleep(POLL_S)
        location.finding.ready = True  # later answers are not waited for
        return location.finding

    # What is computed again.

    def _sample(self, sequence: VllmSequence, held: HeldChain, hashes: Sequence[bytes], start: int) -> None:
        """The last block that could be brought is computed instead."""
        first = len(held.chain) if held.fetched else start
        last = len(held.chain) + len(held.fetched) - 1
        self.checks.expect(hashes[last], SampledRestore(sequence.root, hashes[first], held.source))

    def _compare(self, block: bytes, here: int, saved: int) -> None:
        if (sample := self.checks.take(block)) is None:
            return
        difference = self.checks.difference(self.host.view(here), self.host.view(saved))
        if not self.checks.is_wrong(difference):
            return
        source = sample.source or "this host"
        log.error("a block restored from %s is wrong: its numbers differ by %.3g of the largest", source, difference)
        gone = {sample.first: sample.root} | self.host.pool.continuations(sample.first)
        self.host.drop(sample.first)
        self.wrong_on_device(sample.first)
        for one in gone:
            self._kept.pop(one, None)
        if self.links is not None:
            self.links.erase([BlockName(root, one, b"", b"") for one, root in gone.items()])
        if self.links is not None and sample.source:
            self.links.distrust(sample.source)
        else:
            self._wrong += 1

    def _written(self, slot: int) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def done() -> None:
            self._writing -= 1
            self.host.pool.release([slot])
            self.store.told()

        return partial(soon, loop, done)
