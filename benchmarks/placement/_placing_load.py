"""The load of `_index_load` as placement's core hears it: prompts are token ids, workers are members with a load.

Owns a core whose index is full; what is measured on it is the benchmarks' business.
"""

from __future__ import annotations

import gc
from random import Random

from benchmarks.harness.report import progress
from benchmarks.placement._index_load import BLOCKS, HEARD_BETWEEN, WORKERS, Event, Load, Prompt
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Tick, WorkerRegistered
from kvfleet.placement.index.changes import TIERS, read_changes
from kvfleet.placement.workers.prompts import HashedPrompts
from kvfleet.placement.workers.warm_up import warm_up
from kvproto import block_hash, codec
from kvproto.messages import (
    BlockRun,
    Heartbeat,
    KvEvents,
    Milestone,
    Milestones,
    Passed,
    Placement,
    PlaceRequest,
    Rates,
    State,
    TierEvents,
    WorkerRecord,
)
from kvproto.messages import Load as WorkerLoad

LENGTH, BLOCK_SIZE, VOCABULARY = 128, 16, 128_256
MODEL, REVISION, TENANT, EPOCH = "demo", "r1", "public", "e1"
FLEET_KEY = b"benchmark"
NAMES = [f"w-{number:02}" for number in range(WORKERS)]
ROOT = block_hash.root(REVISION, BLOCK_SIZE, block_hash.tenant_salt(FLEET_KEY, TENANT))


class TokenLoad(Load):
    """Chains of 128 blocks are the hashes of token ids, which `ids_of` gives back."""

    def __init__(self, seed: int = 1) -> None:
        self._tokens = Random(seed + 1)
        self._ids: dict[bytes, tuple[int, ...]] = {}
        super().__init__(seed)

    def ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        return self._ids[prompt.hashes[-1]]

    def _new(self, length: int) -> list[bytes]:
        if length != LENGTH:
            return super()._new(length)
        ids = tuple(self._tokens.choices(range(VOCABULARY), k=LENGTH * BLOCK_SIZE))
        hashes = block_hash.chain(ROOT, ids, BLOCK_SIZE)
        self._ids[hashes[-1]] = ids
        return hashes


def worker_record(name: str) -> WorkerRecord:
    return WorkerRecord(
        name, EPOCH, "l1", State.READY, MODEL, "", "localhost", 1, codec.supported_versions(),
        model_revision=REVISION, block_size=BLOCK_SIZE, blocks=16_384, slots=64, block_bytes=2_097_152,
    )  # fmt: skip


class FullCore:
    """A core that has heard all of `load.fill()`, and hears heartbeats and milestones as time goes on."""

    def __init__(self, load: TokenLoad) -> None:
        warm_up()
        self.core = PlacementCore(
            "p0", "_plc.p0", Random(1).random, prompts=HashedPrompts(FLEET_KEY), unix_ms=lambda: 0
        )
        self.now = 0.0
        self._load = load
        self._seq = [0] * WORKERS
        self._digest = [0] * WORKERS
        for name in NAMES:
            self.core.handle(WorkerRegistered(worker_record(name), None), self.now)
        for event in load.fill():
            self.hear(event)
        self.beat()
        gc.collect()
        gc.freeze()  # the load's million objects are not placement's, and no collection should visit them
        progress(f"{len(self.core.indexer.index):,} blocks of {WORKERS} workers indexed")
        assert BLOCKS - 8_192 <= len(self.core.indexer.index) <= BLOCKS

    def hear(self, event: Event) -> None:
        worker = event.worker
        self._seq[worker] += 1
        for one in (*event.removed, *event.stored):
            self._digest[worker] ^= block_hash.digest_term(one)
        tier = TIERS[event.tier]
        changes = [TierEvents(tier, True, (BlockRun(b"", tuple(event.removed)),))] if event.removed else []
        changes.append(TierEvents(tier, False, (BlockRun(event.parent, tuple(event.stored)),)))
        data = codec.encode_events(KvEvents(EPOCH, self._seq[worker], tuple(changes)))
        self.core.indexer.on_changes(NAMES[worker], read_changes(data), self.now)

    def go_on(self) -> None:
        """What happens to the index between two decisions."""
        for event in self._load.steady(HEARD_BETWEEN):
            self.hear(event)

    def beat(self) -> None:
        """Half a second passes: everybody says what it has to do, which is not the same for all."""
        self.now += 0.5
        for number, name in enumerate(NAMES):
            load = WorkerLoad(running=number % 7, slots=64, queued_prefill_tokens=200 * (number % 11))
            rates = Rates(8_000.0 + 50 * number, 20.0, 1_000.0, {"host": 8e9, "vault": 2e9})
            seq, digest = self._seq[number], self._digest[number]
            beat = Heartbeat(name, EPOCH, State.READY, load, rates, event_seq=seq, digest=digest)
            self.core.handle(beat, self.now)
        self.core.handle(Tick(), self.now)


def lived(placement: Placement, ask: PlaceRequest) -> list[Milestones]:
    """What its worker says of it in the end, in two messages as it mostly is: taken and started; answered and gone."""
    who = TENANT, ask.request, ask.attempt
    taken = (
        Milestone(*who, Passed.ACCEPTED),
        Milestone(*who, Passed.STARTED, 0.001, len(ask.prompt_ids), placement.expected_hit),
    )
    gone = Milestone(*who, Passed.FIRST_TOKEN, 0.1), Milestone(*who, Passed.ENDED, 0.2, output_tokens=10)
    return [Milestones(placement.worker, EPOCH, items) for items in (taken, gone)]
