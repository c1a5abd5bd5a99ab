"""The state of a replica: its fleet, bookings, index, ledger and regions. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.placement.decide.region_summaries import RegionSummaries
from kvfleet.placement.decide.repeats import Repeats
from kvfleet.placement.events import Action, RecordDecision
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.index.prefix_index import unpack
from kvfleet.placement.record.ledger import Ledger
from kvfleet.placement.workers.bookings import Bookings
from kvfleet.placement.workers.expected_returns import ExpectedReturns
from kvfleet.placement.workers.feedback import Belief
from kvfleet.placement.workers.fleet import Fleet
from kvfleet.placement.workers.inflight_blocks import InflightBlocks
from kvfleet.placement.workers.price_kernel import OUTPUT
from kvproto.block_hash import HASH_BYTES
from kvproto.messages import BookedBatch, Milestones, Passed, Tier

OWN_TIERS = (Tier.DEVICE.value, Tier.HOST.value)


@dataclass(frozen=True, slots=True)
class PlacementState:
    """Of the replica `placement`; the core owns each part."""

    placement: str
    fleet: Fleet
    bookings: Bookings
    indexer: KvIndexer
    inflight: InflightBlocks
    ledger: Ledger
    repeats: Repeats
    region_summaries: RegionSummaries
    returns: ExpectedReturns

    def hear(self, milestones: Milestones, now: float) -> list[Action]:
        """Take milestones of a worker's present life, of requests placed by any replica."""
        worker, known = milestones.worker, self.fleet.workers[milestones.worker]
        actions: list[Action] = []
        for one in milestones.items:
            self.bookings.hear(worker, one, now)
            if one.passed in (Passed.FIRST_TOKEN, Passed.ENDED):
                self.inflight.fulfil((one.tenant, one.request), worker, now)
            if one.passed is Passed.ENDED and one.code is None:
                self.fleet.workloads.learn(OUTPUT, known.column, float(one.output_tokens))
            self.repeats.on_milestone(worker, milestones.epoch, one, now)
            entry = self.ledger.on_milestone(worker, one)
            if entry is None:
                continue
            if one.passed is Passed.STARTED:
                # Blocks from vaults and peers say nothing about this worker's own index.
                found = sum(one.cached.get(tier, 0) for tier in OWN_TIERS)
                self.fleet.workloads.trust(known.column, known.experience.observe(entry.promised, found, now))
            elif one.passed is Passed.ENDED and self.ledger.keeps_hashes:
                actions.append(RecordDecision(entry.decision(), entry.hashes, entry.block_size))
        return actions

    def book(self, batch: BookedBatch, now: float) -> None:
        if batch.placement == self.placement:
            return
        for one in batch.items:
            if (worker := self.fleet.workers.get(one.worker)) is None:
                continue
            key = one.tenant, one.request
            self.bookings.book(one, worker.column, now)
            self.repeats.place(key, worker.id, worker.epoch, one.attempt, now)
            whole = len(one.hashes) // HASH_BYTES * HASH_BYTES
            booking = self.bookings.find(key)
            if booking is not None and not booking.prefilled:  # else the worker's word of its blocks came first
                self.inflight.make(key, worker.id, unpack(one.hashes[:whole]), now)

    def give_up(self, key: tuple[str, str], attempt: int, failed: bool) -> None:
        """A bare producer's attempt is over; may be called again. `failed`: no worker has it."""
        if failed:
            self.repeats.give_up(key, attempt)
        if self.bookings.release(key, attempt=attempt):
            self.inflight.break_off(key)

    def heal(self, now: float) -> None:
        for worker in self.fleet.workers.values():
            if worker.experience.belief is not Belief.EXACT:
                self.fleet.workloads.trust(worker.column, worker.experience.heal(now))
