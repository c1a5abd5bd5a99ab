"""What became of requests that were placed, here or by other replicas: their load, the promise of their blocks, what
they found, and where they can be had again. Pure.
"""

from __future__ import annotations

from kvfleet.placement.actions import Action, RecordDecision
from kvfleet.placement.decide.state import PlacementState
from kvfleet.placement.index.prefix_index import unpack
from kvfleet.placement.workers.bookings import BOOKING_LIMIT_S
from kvproto.block_hash import HASH_BYTES
from kvproto.messages import BookedBatch, Milestone, Milestones, Passed, Tier

OWN_TIERS = (Tier.DEVICE.value, Tier.HOST.value)


class Accounts:
    """Owned by the core; keeps nothing of its own."""

    def __init__(self, state: PlacementState) -> None:
        self._state = state

    def hear(self, milestones: Milestones, now: float) -> list[Action]:
        """Of a worker's present life."""
        worker = milestones.worker
        actions: list[Action] = []
        for one in milestones.items:
            self._account(worker, one, now)
            self._state.repeats.on_milestone(worker, milestones.epoch, one, now)
            entry = self._state.ledger.on_milestone(worker, one)
            if entry is None:
                continue
            if one.passed is Passed.STARTED:
                # What vaults and peers brought, or did not, says nothing about this worker's own index.
                found = sum(one.cached.get(tier, 0) for tier in OWN_TIERS)
                self.trust(worker, self._state.feedback.observe(worker, entry.promised, found, now))
            elif one.passed is Passed.ENDED and self._state.ledger.keeps_hashes:
                actions.append(RecordDecision(entry.decision(), entry.hashes, entry.block_size))
        return actions

    def _account(self, worker: str, one: Milestone, now: float) -> None:
        """Its load, and the promise of its blocks."""
        key = one.tenant, one.request
        match one.passed:
            case Passed.ACCEPTED:
                self._state.bookings.accept(key, worker, one.attempt)
            case Passed.STARTED:
                feed = max(one.prompt_tokens - sum(one.cached.values()), 0)
                self._state.bookings.start(key, worker, one.attempt, feed, now)
            case Passed.FIRST_TOKEN:
                self._state.bookings.prefill(key, worker, one.attempt)
                self._state.inflight.fulfil(key, worker, now)
            case Passed.ENDED:
                self._state.bookings.end(key, worker, one.attempt, now)
                if one.code is None:
                    self._state.fleet.workloads.generated(self._state.fleet.workers[worker].column, one.output_tokens)
                self._state.inflight.fulfil(key, worker, now)

    def book(self, batch: BookedBatch, now: float) -> None:
        """What other replicas placed."""
        if batch.placement == self._state.placement:
            return
        for one in batch.items:
            worker = self._state.fleet.workers.get(one.worker)
            if worker is not None:
                key, column = (one.tenant, one.request), worker.column
                silent_s = BOOKING_LIMIT_S if one.silent_ms is None else one.silent_ms / 1000
                self._state.bookings.book(
                    key, one.attempt, worker.id, column, one.tokens, now, priority=one.priority, silent_s=silent_s
                )
                self._state.repeats.place(key, worker.id, worker.epoch, one.attempt, now)
                whole = len(one.hashes) // HASH_BYTES * HASH_BYTES
                if self._state.bookings.is_to_come(key):  # else the worker's word of its blocks was here before
                    self._state.inflight.make(key, worker.id, unpack(one.hashes[:whole]), now)

    def give_up(self, key: tuple[str, str], attempt: int, failed: bool) -> None:
        """A bare producer's attempt is over, in whatever way: each of them may say so. `failed`: nobody has it."""
        if failed:
            self._state.repeats.give_up(key, attempt)
        if self._state.bookings.release(key, attempt=attempt):
            self._state.inflight.break_off(key)

    def trust(self, worker: str, credit: float) -> None:
        known = self._state.fleet.workers.get(worker)
        if known is not None:
            self._state.fleet.workloads.trust(known.column, credit)
