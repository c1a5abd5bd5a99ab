"""Blocks of conversations that pause: down while a tool runs, up before the next turn. The engine's thread owns it.

    a turn ends ──ended──▶ its chain is remembered for a while
    ReturnExpected ──expect──▶ offered to host and vaults ──all there──▶ first to be evicted from the device
    shortly before the soonest return ──▶ restored, into room that is free or is evicted first, within bounds
    its next turn starts ──returned──▶ the seconds that it did not wait
    the latest return has passed ──▶ first to be evicted again

Nothing is pinned: a running sequence that needs room takes it from here as from anywhere, so a wrong expectation costs
a copy. Nothing outlives the process: a turn that comes back after a crash is restored as any other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers.host import Copier, HostTier
from kvfleet.worker.tiers.link_speed import seconds_of
from kvfleet.worker.tiers.offloader import Chain, Offloader
from kvfleet.worker.tiers.restorer import Restorer
from kvproto.messages import Tier
from kvservice.pause_book import SURE, UP_SHARE, PauseBook, Paused, is_long_enough

KEPT_NAMES = 131_072  # of blocks of turns that ended a moment ago
LEFT_SHARE = 1 / 8  # of the device's blocks, for running sequences to grow into
LEAD_S = 0.05  # on top of the restore itself

Attempt = tuple[str, int]


class EndedTurn(NamedTuple):
    """`key`: the last full block of its prompt, with which the next turn begins whatever becomes of the answer."""

    key: bytes
    chain: Chain


@dataclass(eq=False, slots=True)
class Pauses:
    pool: BlockPool
    host: HostTier
    copier: Copier
    offloader: Offloader
    restorer: Restorer
    clock: Callable[[], float]
    prompt_seconds: Callable[[int, int], float] = lambda position, tokens: 0.0  # to compute them; the engine's
    paused_total: int = 0
    brought_total: int = 0  # blocks that were restored ahead
    given_back_total: int = 0  # of them, those whose conversation did not come back in time
    saved_s_total: float = 0.0
    _ended: OrderedDict[Attempt, EndedTurn] = field(default_factory=OrderedDict)
    _names: int = 0  # of blocks in these
    _book: PauseBook[bytes, Chain] = field(default_factory=PauseBook)  # by their keys
    _sinking: dict[bytes, Chain] = field(default_factory=dict)  # whose copies are not all there yet

    def ended(self, sequence: EngineSequence) -> None:
        """A sequence is about to release its blocks. Of several choices the first is the conversation."""
        end = 0 if sequence.private else min(sequence.filled, len(sequence.hashes))
        if not end or sequence.spec.choice or not self.host.blocks:
            return
        self._forget(sequence.key[:2])
        key = sequence.hashes[max(min(sequence.num_prompt // self.pool.block_size, end), 1) - 1]
        self._ended[sequence.key[:2]] = EndedTurn(key, Chain(sequence.root, sequence.hashes, end))
        self._names += end
        while self._names > KEPT_NAMES and len(self._ended) > 1:
            self._forget(next(iter(self._ended)))

    def _forget(self, attempt: Attempt) -> EndedTurn | None:
        turn = self._ended.pop(attempt, None)
        if turn is not None:
            self._names -= turn.chain.end
        return turn

    def expect(self, attempt: Attempt, soonest_s: float, latest_s: float) -> bool:
        """Whether the pause is long enough for its blocks to go down and come up again."""
        turn = self._forget(attempt)
        if turn is None:
            return False
        key, chain = turn
        nbytes = chain.end * self.host.block_bytes
        down_s, up_s = self.copier.speed_out.seconds(nbytes), self.copier.speed_in.seconds(nbytes)
        remote = self.restorer.remote
        if remote is not None and (vaults := remote.speed(Tier.VAULT)) is not None:  # the host may evict it meanwhile
            up_s = max(up_s, seconds_of(vaults, nbytes))
        if not is_long_enough(soonest_s, down_s + LEAD_S, up_s):
            return False
        now = self.clock()
        up_at = now + soonest_s - SURE * up_s - LEAD_S
        self._book.begin(key, Paused(chain, up_at, now + max(latest_s, soonest_s)))
        self.paused_total += 1
        self.offloader.offer_chain(chain)
        self._sinking[key] = chain
        return True

    def maintain(self) -> None:
        for key, chain in list(self._sinking.items()):
            if self._is_below(chain) or not self.offloader.carries(chain.last):
                del self._sinking[key]
                if key in self._book.paused:
                    self._sink(chain)
        for key, pause, is_over in self._book.due(self.clock()):
            self._sinking.pop(key, None)
            if is_over:
                self.given_back_total += pause.brought
                self._sink(pause.chain)
            else:
                self._bring_up(pause)

    def _is_below(self, chain: Chain) -> bool:
        return self.host.pool.index.lists(chain.last)

    def _sink(self, chain: Chain) -> None:
        """What has a copy below goes first; what has none stays, as long as other blocks of its age do."""
        hashes = chain.hashes[: chain.end]
        below = max(self.host.pool.index.depth(hashes), self.offloader.vaulted(hashes))
        if below >= self.pool.index.depth(hashes):
            self.pool.rest_first(hashes)

    def _bring_up(self, pause: Paused[Chain]) -> None:
        chain = pause.chain
        hashes = chain.hashes[: chain.end]
        pause.start = self.pool.index.depth(hashes)
        kept = self.pool.chain_to(hashes)
        self.pool.acquire(kept)  # used just now, so it is not evicted first any more
        self.pool.release(kept)
        size = self.pool.num_blocks
        room = min(self.pool.available - int(LEFT_SHARE * size), int(UP_SHARE * size) - self._book.brought)
        on_end = partial(self._came, pause)
        pause.brought = self.restorer.bring_up(chain.root, hashes, room, self._compute_s, on_end)

    def _compute_s(self, start: int, end: int) -> float:
        size = self.pool.block_size
        return self.prompt_seconds(start * size, (end - start) * size)

    def _came(self, pause: Paused[Chain], blocks: int, seconds: float) -> None:
        pause.brought, pause.seconds = blocks, seconds
        self.brought_total += blocks

    def returned(self, sequence: EngineSequence) -> float:
        """The sequence starts. Seconds of restoring that it did not wait for."""
        paused = self._book.paused
        key = next((one for one in reversed(sequence.hashes) if one in paused), None) if paused else None
        if key is None or (pause := self._book.back(key)) is None:
            return 0.0
        on_device = (sequence.cached_tokens - sum(sequence.restored.values())) // self.pool.block_size
        saved_s = pause.saved_s(on_device)
        self.saved_s_total += saved_s
        return saved_s

    def forget(self, hashes: Iterable[bytes]) -> None:
        """These were erased."""
        gone = set(hashes)
        for attempt in [one for one, turn in self._ended.items() if turn.chain.last in gone]:
            self._forget(attempt)
        for key in [key for key, pause in self._book.paused.items() if pause.chain.last in gone]:
            self._book.back(key)
            self._sinking.pop(key, None)

    def due_in(self) -> float:
        """Seconds until `maintain` has to be called even if nothing wakes the engine."""
        return max(0.0, self._book.next_at - self.clock())

    @property
    def waiting(self) -> int:
        return len(self._book.paused)
