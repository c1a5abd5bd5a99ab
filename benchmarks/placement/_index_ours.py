"""Our prefix index under the load of `_index_load`, spoken to as placement does: bytes in, blocks per worker out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.report import progress
from benchmarks.placement._index_load import BLOCKS, HEARD_BETWEEN, RUN, VAULTS, WORKERS, Event, Load, Prompt
from kvfleet.placement.index.changes import TIERS, read_changes
from kvfleet.placement.index.kv_indexer import Follows, KvIndexer
from kvfleet.placement.workers.warm_up import warm_up
from kvproto import codec
from kvproto.block_hash import digest_term
from kvproto.messages import BlockRun, Heartbeat, KvEvents, State, TierEvents

EPOCH = "e1"
NAMES = [f"w-{number:02}" for number in range(WORKERS)]
MEMBERS = [*NAMES, *(f"vault-{number}" for number in range(VAULTS))]


class Ours:
    """A full index. `indexer` is placement's own."""

    def __init__(self, load: Load) -> None:
        warm_up()
        self.indexer = KvIndexer(BLOCKS, WORKERS)
        self._load = load
        self._seq = [0] * len(MEMBERS)
        self._digest = [0] * len(MEMBERS)
        for number, name in enumerate(MEMBERS):
            self.indexer.join(name, EPOCH, vault=number >= WORKERS)
        for event in load.fill():
            self.hear(event.worker, self.encode(event))
        self.check()
        gc.collect()
        gc.freeze()  # the load's million objects are not placement's, and no collection should visit them
        progress(
            f"{len(self.indexer.index):,} blocks of {WORKERS} workers indexed, {self.indexer.vaults()[1]:,} in vaults"
        )

    def encode(self, event: Event) -> bytes:
        """As the worker would send it now: its events are numbered."""
        self._seq[event.worker] += 1
        for one in (*event.removed, *event.stored):
            self._digest[event.worker] ^= digest_term(one)
        tier = TIERS[event.tier]
        changes = [TierEvents(tier, True, (BlockRun(b"", tuple(event.removed)),))] if event.removed else []
        changes.append(TierEvents(tier, False, (BlockRun(event.parent, tuple(event.stored)),)))
        return codec.encode_events(KvEvents(EPOCH, self._seq[event.worker], tuple(changes)))

    def hear(self, worker: int, data: bytes) -> None:
        self.indexer.on_changes(MEMBERS[worker], read_changes(data), 0.0)

    def check(self) -> None:
        """The index is full, and agrees with every worker on what was said."""
        assert self.indexer.unknown_total == 0
        for name, seq, digest in zip(MEMBERS, self._seq, self._digest, strict=True):
            self.indexer.on_heartbeat(Heartbeat(name, EPOCH, State.READY, event_seq=seq, digest=digest), 0.0)
            assert self.indexer.state_of(name) is Follows.EXACT, name
        assert not self.indexer.tick(0.0)
        assert BLOCKS - 8_192 <= len(self.indexer.index) <= BLOCKS, "the index is not full"

    # ------------------------------------------------------------------ what is measured

    def apply(self, count: int) -> float:
        """Block operations per second of `count` events of 16 blocks stored and 16 removed, bytes to index."""
        heard = [(NAMES[event.worker], self.encode(event)) for event in self._load.steady(count)]
        began = time.perf_counter()
        for name, data in heard:
            self.indexer.on_changes(name, read_changes(data), 0.0)
        seconds = time.perf_counter() - began
        self.check()
        return 2 * RUN * count / seconds

    def find(self, prompts: Iterator[Prompt], question: Callable[[Any], Any], form: Callable[[list[bytes]], Any],
             answer: Callable[[Any], dict[str, int]]) -> tuple[list[float], list[float]]:  # fmt: skip
        """Seconds of each look-up, of those that hit and of all, with events heard in between.

        `form` makes of a prompt's hashes what `question` takes, `answer` of what it gives the blocks of those workers
        that have some; both are not timed.
        """
        hits, every = [], []
        for prompt in prompts:
            for event in self._load.steady(HEARD_BETWEEN):
                self.hear(event.worker, self.encode(event))
            asked = form(prompt.hashes)
            began = time.perf_counter()
            found = question(asked)
            seconds = time.perf_counter() - began
            right = {name: depth for name, depth in zip(NAMES, prompt.reaches, strict=True) if depth}
            assert answer(found) == right, "a wrong answer"
            every.append(seconds)
            if prompt.is_hit:
                hits.append(seconds)
        return hits, every
