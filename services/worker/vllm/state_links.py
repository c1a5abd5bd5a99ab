"""Loop: recurrent states of a vLLM worker between its host memory, vaults and peers, where all slots of one are one
record. Owned by the worker's event loop.

    a chain is kept ──copy──▶ vault          vault, peer ──copy──▶ slots, listed if the block before it is here
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvfleet.worker.blocks.block_pool import Lendable
from kvfleet.worker.blocks.chain_location import BlockName, ChainLocation, StateForm
from kvfleet.worker.blocks.content_index import Content
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.break_even import LATE, SLACK, ComputeSeconds
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.link_speed import seconds_of
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.vllm.host_fetch import landed
from kvfleet.worker.vllm.sent_hashes import SentHashes
from kvfleet.worker.vllm.state_records import StateRecords
from kvproto.block_hash import state_after
from kvproto.dataplane.block import MAX_BLOCK_BYTES, state_format
from kvproto.messages import Tier

log = logging.getLogger(__name__)

MOST_TRIED = 2  # states for one request


def form_of(blocks: bytes, slots: int, slot_bytes: int) -> StateForm | None:
    """Of states in so many slots, beside blocks of this format. One may stand behind any block: where a step ended.
    None: too large for a record."""
    nbytes = slots * slot_bytes
    form = state_format(blocks, [(slots, "slots", 0, [slot_bytes], "uint8")])
    return StateForm(form, nbytes, every=1) if nbytes <= MAX_BLOCK_BYTES else None


@dataclass(eq=False)
class StateLinks:
    states: StateRecords
    host: HostTier
    links: RemoteTiers
    form: StateForm
    sent: SentHashes = field(default_factory=SentHashes)
    _unsent: deque[tuple[BlockName, Callable[[], None]]] = field(default_factory=deque)
    _sending: asyncio.Task[None] | None = None

    def is_unsent(self, block_hash: bytes) -> bool:
        return block_hash in self.states and state_after(block_hash) not in self.sent

    def keep(self, name: BlockName, on_done: Callable[[], None]) -> None:
        """Have vaults keep the unsent state at this block's end. `on_done` is called later, from any thread."""
        self.sent.add(state_after(name.hash))
        self._unsent.append((name, on_done))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="states")

    async def _send(self) -> None:
        """One after the other, as each is copied."""
        try:
            while self._unsent:
                name, on_done = self._unsent.popleft()
                record = await self._read(name.hash)
                state = name.state()
                if record is None or not self.links.offload(state, record, lossy=False, on_done=on_done):
                    self.sent.drop(state.hash)
                    on_done()
        finally:
            self._sending = None

    async def _read(self, block_hash: bytes) -> memoryview | None:
        """Slot by slot: one may have many megabytes, and others wait for the loop."""
        if block_hash not in self.states:
            return None
        record, slots = memoryview(bytearray(self.form.nbytes)), self.states.slots(block_hash)
        self.host.pool.acquire(slots)
        try:
            for part, slot in self._parts(record, slots):
                part[:] = self.host.view(slot)
                await asyncio.sleep(0)
        finally:
            self.host.pool.release(slots)
        return record

    def _parts(self, record: memoryview, slots: Sequence[int]) -> Iterator[tuple[memoryview, int]]:
        size = self.host.block_bytes
        return ((record[at * size : (at + 1) * size], slot) for at, slot in enumerate(slots))

    def missed(self, location: ChainLocation) -> None:
        """What vaults were sent of this chain's states and do not have is sent again."""
        found = location.finding
        for point, name in enumerate(location.names[: found.vault], 1):
            if name.hash in self.states and point not in found.vault_states:
                self.sent.drop(state_after(name.hash))

    def offers(
        self, location: ChainLocation, here: int, held: int, most: int, compute_s: ComputeSeconds
    ) -> Iterator[tuple[int, Tier, float]]:
        """States behind more than `here` blocks, deepest first, that come sooner than those are computed, with the
        blocks behind the `held` ones: where each is, and how long it may take."""
        found, tried = location.finding, 0
        for point, tier in found.states(here, min(most, max(held, found.vault, found.peer))):
            offers = break_even.remote_offers(self.links, location, point, point)
            for speed in (offer.speed for offer in offers if offer.tier is tier):
                state_s, saved_s = seconds_of(speed, self.form.nbytes), compute_s(here, point)
                blocks_s = seconds_of(speed, (point - held) * self.host.block_bytes) if point > held else 0.0
                if break_even.SURE * (state_s + blocks_s) + break_even.HANDLING_S < saved_s:
                    tried += 1
                    yield point, tier, LATE * state_s + SLACK * saved_s
            if tried == MOST_TRIED:
                return

    async def fetch(self, location: ChainLocation, point: int, tier: Tier, limit_s: float, *, exact: bool) -> bool:
        """Bring the state behind `point` blocks, which are here. Returns whether it is here too."""
        name = location.names[point - 1]
        if name.hash in self.states:
            return True
        record = memoryview(bytearray(self.form.nbytes))
        landing = await landed(self.links, tier, [name.state()], [record], location, limit_s, exact=exact)
        if landing.headers[0] is None:
            log.debug("a state did not come: %s", landing.failure or "late")
            return False
        slots = self.host.allocate(self.form.nbytes // self.host.block_bytes)
        if len(slots) * self.host.block_bytes < self.form.nbytes:
            self.host.pool.release(slots)
            return False
        try:
            for part, slot in self._parts(record, slots):
                self.host.view(slot)[:] = part
                await asyncio.sleep(0)
        except asyncio.CancelledError:  # nobody waits for it any more
            self.host.pool.release(slots)
            raise
        if self.states.add(name.hash, tuple(slots)) and tier is Tier.VAULT:
            self.sent.add(state_after(name.hash))
        return name.hash in self.states

    def lendable(self, asked: Iterable[bytes]) -> dict[bytes, Lendable]:
        """As `Lender.lendable`."""
        pool, found = self.host.pool, dict[bytes, Lendable]()
        for name in asked:
            block_hash = self.states.find(name)
            block = None if block_hash is None else pool.index.find(block_hash)
            if block_hash is not None and block is not None:
                content = Content.of_state(pool.index[block].root, block_hash, lossy=False)
                slots = self.states.slots(block_hash)
                found[name] = Lendable(content, self.form.format, partial(self._joined, slots), (pool, slots))
        return found

    def _joined(self, slots: Sequence[int]) -> memoryview:
        """On the thread of who has asked for it, while the slots are held."""
        record = memoryview(bytearray(self.form.nbytes))
        for part, slot in self._parts(record, slots):
            part[:] = self.host.view(slot)
        return record
