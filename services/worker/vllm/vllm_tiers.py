"""Loop: tiers below a vLLM server: host memory that it shares, and vaults. Owned by the worker's event loop.

    prepare: where is the chain? ──▶ what is worth it comes from vaults to the host ──▶ vLLM is told the slots
    vLLM saves what it computes to the host ──▶ a sequence leaves ──▶ its chain is written to vaults

Other workers' blocks are read like vaults', and this one's host is lent to them (`network.lending`).

Nothing is promised to vLLM that is not here, checked and held until vLLM has read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvfleet.worker.blocks.chain_location import BlockName, ChainLocation, Finding, names_of
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.break_even import LATE, ComputeSeconds, Offer, RestoredPart
from kvfleet.worker.tiers.link_speed import CopySpeed, LinkSpeed
from kvfleet.worker.tiers.looking_tiers import LookingTiers, blocks_of
from kvfleet.worker.tiers.offloader import ReuseWatch
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import WRONG
from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks
from kvfleet.worker.vllm.host_fetch import fetch_to_host, found_of, soon
from kvfleet.worker.vllm.no_tiers import MoveNews, StoreTiers
from kvfleet.worker.vllm.restore_checks import RestoreChecks, SampledRestore
from kvfleet.worker.vllm.sent_hashes import SentHashes
from kvfleet.worker.vllm.shared_slots import AskedChain, SharedSlots
from kvfleet.worker.vllm.state_links import StateLinks
from kvfleet.worker.vllm.state_records import StateRecords
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvfleet_vllm.wire import BlocksSaved, BlocksSaving, StateSaving
from kvproto.block_hash import Root, chain, in_tier, pack_ids
from kvproto.dataplane.block import RUN_BLOCKS
from kvproto.messages import HotChain, Tier, TierLoad

log = logging.getLogger(__name__)

SETTLED_POLL_S = 0.02
READ_S = 60.0  # a chain is held for vLLM, which has not said that it has read it
COPY_BYTES_PER_S = 4e9  # between host and device, until vLLM has told


@dataclass(eq=False, slots=True)
class HeldChain:
    """Slots that vLLM reads: `chain` from the beginning as the host has it, then those `fetched` from `tier`, vaults or
    another worker, the last one from `source`; of a model with states the one behind them."""

    chain: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    source: str = ""
    tier: Tier = Tier.VAULT
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
    lent: Mapping[int, object] | None = None  # what peers read just now; None: they cannot
    states: StateLinks | None = None  # of a hybrid model, beside `links`
    saves_all: bool = False  # also what is likely never asked for again
    tells_all: bool = True  # of what the device has of a chain, all can be gone on from; else that is not known
    _held: dict[str, HeldChain] = field(default_factory=dict)  # by vLLM's name of the request
    _fetched: dict[str, tuple[int, Tier]] = field(default_factory=dict)  # tokens, by the same name
    reuse: ReuseWatch = field(default_factory=ReuseWatch)
    _copies: CopySpeed = field(default_factory=CopySpeed)
    _wrong: int = 0  # blocks of the host
    _writing: int = 0
    _tokens: Counter[Tier] = field(default_factory=Counter)
    _restores: Counter[Tier] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.host = self.store.host
        self.block_size = self.host.pool.block_size
        self.store.computed_again = self._compare
        self._sent = SentHashes() if self.states is None else self.states.sent

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
    def lends(self) -> bool:
        return self.lent is not None

    @property
    def _ends(self) -> tuple[Tier, ...]:
        return (Tier.VAULT, Tier.PEER) if self.lends else (Tier.VAULT,)

    @property
    def is_lending(self) -> bool:
        return bool(self.lent)

    def meet(self, worker: str) -> Awaitable[None] | None:
        return self.met(worker)

    async def rates(self) -> Mapping[str, float]:
        found = {Tier.HOST: self._copies.bytes_per_s}
        for tier in self._ends:
            speed = self.links.speed(tier) if self.links is not None else None
            found[tier] = speed.bytes_per_s if speed is not None else 0.0
        return {tier.value: rate for tier, rate in found.items() if rate}

    async def preload(self, chain: HotChain, limit_s: float) -> None:
        """To the host."""
        root, hashes = blocks_of(chain)
        start = self.host.depth(hashes, 0, len(hashes))
        if self.links is None or start >= len(hashes):
            return
        names = names_of(root, hashes, (), self.block_size)
        if (meeting := self.meet(chain.source)) is not None:
            await meeting
        part = RestoredPart(Tier.PEER if chain.source else Tier.VAULT, start, len(hashes), limit_s / LATE)
        location = ChainLocation(names, Finding(True), chain.source)
        slots, _ = await fetch_to_host(self.host, self.links, root, hashes, part, location, 0.0, exact=False)
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
        self._held[name] = held = HeldChain()
        start = min(self.blocks.depth(hashes), usable) if self.tells_all else 0
        if (states := self.store.states) is None:
            await self._hold(held, sequence, hashes, start, usable)
        else:  # vLLM goes on from a state, and computes what lies behind it
            usable = await self._hold_to_state(held, sequence, hashes, states, usable)
        told: dict[str, Any] = {
            "store": {"path": str(self.store.memory.path), "slots": self.host.blocks, "block_tokens": size}
        }
        self.reuse.ask(sequence.root, hashes)
        here = len(self.host.pool.chain_to(hashes))
        if self.saves_all or not self.reuse.is_rare(sequence.root):
            told["save_from"] = here
        self.store.asked(name, asked, len(hashes) - here if "save_from" in told else 0)
        slots = held.chain + held.fetched
        if states is not None and len(slots) == usable > 0:
            held.state = states.hold(hashes[usable - 1])
        elif len(slots) > start and self.checks.is_due():
            self._sample(sequence, held, hashes, start)
            told["save_from"] = len(slots) - 1
            slots = slots[:-1]
        if len(slots) > start:
            self._fetched[name] = max(0, len(slots) - len(held.chain)) * size, held.tier
            told["restore"] = {"at": 0, "slots": slots, "state": held.state}
        else:
            self.read(name, self.store.ranks)
        return told

    def restored(self, name: str, tokens: int) -> dict[Tier, int]:
        """Of the tokens that vLLM restores for a request, how many came from which tier."""
        brought, tier = self._fetched.get(name, (0, Tier.VAULT))
        fetched = min(tokens, brought)
        found = {tier: fetched, Tier.HOST: tokens - fetched}
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
                self.host.pool.release(held.chain + held.fetched + held.state)

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
        self._sent.lost(self.links.losses)
        pool = self.host.pool
        for at, slot in enumerate(pool.chain_to(hashes)):
            has_state, is_sent = self.states is not None and self.states.is_unsent(hashes[at]), hashes[at] in self._sent
            if is_sent and not has_state:
                continue
            content = pool.index[slot]
            run = hashes[at - at % RUN_BLOCKS]
            name = BlockName(content.root, hashes[at], content.parent, pack_ids(content.ids), run)
            if has_state and self.states is not None:
                self._writing += 1
                self.states.keep(name, self._written())
            if is_sent:
                continue
            pool.acquire([slot])
            if not self.links.offload(name, self.host.view(slot), lossy=False, on_done=self._written(slot)):
                pool.release([slot])
                return
            self._writing += 1
            self._sent.add(hashes[at])

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int) -> int:
        gone = self.host.erase(root, hashes, ids, keep)
        self.store.told()
        first = keep // self.block_size
        self._sent.forget(hashes[first:])
        if self.links is not None and len(hashes) > first:
            self.links.erase(names_of(root, hashes, ids, self.block_size)[first:])
        return gone

    @property
    def digest(self) -> int:
        states = 0 if self.store.states is None else in_tier(self.store.states.digest, Tier.STATE.number)
        return in_tier(self.host.pool.digest, Tier.HOST.number) ^ states

    def loads(self) -> dict[str, TierLoad]:
        pool, size = self.host.pool, self.host.block_bytes
        ends = {tier.value: TierLoad() for tier in self._ends}
        loads = {} if self.links is None else {**ends, **self.links.loads()}
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
        if self.store.states is not None:
            loads[Tier.STATE.value] = self.store.states.load(size)
        return loads

    def on_move(self, told: MoveNews) -> None:
        if isinstance(told, BlocksSaving | StateSaving):
            self.store.on_saving(told)
        elif isinstance(told, BlocksSaved):
            self.store.on_saved(told)
        else:
            self._copies.observe(told.blocks * self.host.block_bytes, told.seconds)
            self.read(told.request)

    def holdings(self) -> dict[Tier, list[bytes]]:
        states = {} if self.store.states is None else {Tier.STATE: self.store.states.hashes()}
        return {Tier.HOST: self.host.pool.index.hashes()} | states

    def depths(self, hashes: Sequence[bytes]) -> dict[Tier, int]:
        return {Tier.HOST: self.host.depth(hashes, 0, len(hashes))}

    # Restores.

    async def _hold(
        self, held: HeldChain, sequence: VllmSequence, hashes: Sequence[bytes], start: int, usable: int
    ) -> None:
        """Hold the part of the chain that is cheaper read than computed. `start` blocks are on the device."""
        pool, location = self.host.pool, sequence.spec.location
        depth = self.host.depth(hashes, start, usable, exact=sequence.spec.exact)
        copies = LinkSpeed(0.0, self._copies.bytes_per_s or COPY_BYTES_PER_S)
        offers = [Offer(Tier.HOST, depth, copies)]
        if location is not None and self.links is not None and depth < usable and not sequence.start:
            found = await found_of(location)
            vault, peer = min(found.vault, usable), min(found.peer, usable)
            ends = (0, peer) if peer > vault else (vault, 0)  # one of them: it is one fetch
            offers += break_even.remote_offers(self.links, location, *ends)
        compute_s = self._compute_s(location)
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
                held.tier = part.tier
                computed_s, exact = compute_s(part.start, part.end), sequence.spec.exact
                held.fetched, held.source = await fetch_to_host(
                    self.host, self.links, sequence.root, hashes, part, location, computed_s, exact=exact
                )
                self.store.told()

    def _compute_s(self, location: ChainLocation | None) -> ComputeSeconds:
        size, seconds = self.block_size, self.rates_of.prompt_seconds
        return break_even.price_of_computing(location, lambda one, other: seconds(one * size, (other - one) * size))

    async def _hold_to_state(
        self, held: HeldChain, sequence: VllmSequence, hashes: Sequence[bytes], states: StateRecords, most: int
    ) -> int:
        """Hold the chain to the deepest of its states that is worth it, which is here then. Returns where it ends."""
        exact, location = sequence.spec.exact, sequence.spec.location

        def depth() -> int:
            return self.host.depth(hashes, 0, most, exact=exact)

        if self.states is not None and location is not None and not sequence.start:
            await found_of(location)
            self.states.missed(location)
            here, compute_s = states.deepest(hashes[: depth()]), self._compute_s(location)
            for point, tier, limit_s in self.states.offers(location, here, depth(), most, compute_s):
                await self._hold(held, sequence, hashes, 0, point)
                is_whole = len(held.chain) + len(held.fetched) == point
                if is_whole and await self.states.fetch(location, point, tier, limit_s, exact=exact):
                    self.store.told()
                    return point
                self.host.pool.release(held.chain + held.fetched)
                held.chain, held.fetched = [], []
        await self._hold(held, sequence, hashes, 0, here := states.deepest(hashes[: depth()]))
        return here

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
        self._sent.forget(gone)
        if self.links is not None:
            self.links.erase([BlockName(root, one, b"", b"") for one, root in gone.items()])
        if self.links is not None and sample.source:
            self.links.distrust(sample.source)
        else:
            self._wrong += 1

    def _written(self, *slots: int) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def done() -> None:
            self._writing -= 1
            self.host.pool.release(slots)
            self.store.told()

        return partial(soon, loop, done)
