"""Brings blocks up to the device before a sequence runs. Read `claims`, then `poll`. The engine's thread owns it.

    a sequence's turn ──claims──▶ looks ──▶ its turn again
                            │                                      ┌ all came, or what came is enough ┐
                            └──▶ a job: blocks of the pool are taken, copies and fetches run beside steps
                                                                   └ poll: they are listed, its turn again

Nothing here waits. A job holds the chain that is on the device already and the blocks that its parts land in; when it
ends, blocks that arrived without a gap are listed like computed ones, and the sequence, back in the queue, finds them.
A job that takes longer than it may ends with what has arrived by then.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvfleet.worker.blocks.block_pool import BlockPool, Match
from kvfleet.worker.blocks.chain_location import ChainLocation, Finding, names_of
from kvfleet.worker.model.base import BlockMemory
from kvfleet.worker.schedule.sequence import Restored
from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers.break_even import (
    ComputeSeconds,
    RestoredPart,
    answer_limit_s,
    cheapest,
    host_offers,
    is_worth_going_on,
    location_of,
    look_worth_s,
    price_of_computing,
    remote_offers,
)
from kvfleet.worker.tiers.copier import Copier, CopyJob
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.landing import Landing
from kvfleet.worker.tiers.restore_job import Arrived, RestoreJob, RestoreSample, RunningPart
from kvproto.block_hash import Root, unpack_ids
from kvproto.messages import Tier

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets

SAMPLED = 32  # one restore in so many is checked by computing
MOST_SAMPLES = 16
MOST_RESTORES = 2  # for one sequence before it runs
LATE = 1.5  # times the predicted seconds, and as much more as does not hurt:
SLACK = 0.2  # of what computing would take
GRACE_S = 0.005


class Restorer:
    """`wake` is called, from any thread, when there is something to poll."""

    def __init__(
        self,
        pool: BlockPool,
        memory: BlockMemory,
        host: HostTier | None,
        copier: Copier,
        remote: RemoteTiers | None,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens_total: Counter[Tier] = Counter()
        self.restores_total: Counter[Tier] = Counter()
        self.seconds_total: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self.failures_total: Counter[tuple[Tier, str]] = Counter()
        self._pool = pool
        self._memory = memory
        self._host = host
        self._copier = copier
        self._remote = remote
        self._wake = wake
        self._clock = clock
        self.samples: deque[RestoreSample] = deque(maxlen=MOST_SAMPLES)
        self.sampled = SAMPLED
        self._exact_restores = 0
        self._jobs: list[RestoreJob] = []
        self._looking: dict[int, tuple[EngineSequence, float]] = {}
        self._unstarted: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ begin

    def claims(self, sequence: EngineSequence, match: Match, *, spare: int, compute_s: ComputeSeconds) -> bool:
        """Whether the sequence, whose turn it is, is to wait for blocks that are on their way now.

        `spare` blocks of the pool are left to those who run.
        """
        size = self._pool.block_size
        start, usable = len(match.blocks), (len(sequence.ids) - 1) // size
        if sequence.restores >= MOST_RESTORES or start >= usable:
            return False
        exact = sequence.spec.exact
        for job in self._jobs:
            if job.start <= start < job.end and job.hashes[start] == sequence.hashes[start] and job.exact >= exact:
                sequence.restores += 1
                job.waiting.append(sequence)
                return True
        location = location_of(sequence)
        compute_s = price_of_computing(location, compute_s)
        price = partial(cheapest, start=start, block_bytes=self._memory.block_bytes, compute_s=compute_s)
        offers = host_offers(self._host, self._copier.speed_in.bytes_per_s, sequence, start, usable)
        if location is not None:
            assert self._remote is not None
            found = location.finding
            if found.ready:
                offers += remote_offers(self._remote, location, min(found.vault, usable), min(found.peer, usable))
            else:
                left = max((offer.end for offer in offers), default=start)
                best = price(offers + remote_offers(self._remote, location, usable, usable, hopes=True))
                is_worth = compute_s(left, usable) > look_worth_s(location)
                if is_worth and best and best[-1].tier is not Tier.HOST:
                    self._looking[id(sequence)] = sequence, self._clock() + answer_limit_s(location)
                    return True
        parts = price(offers)
        room = self._pool.available - self._pool.idle_among(match.blocks) - spare
        parts = [part._replace(end=min(part.end, start + room)) for part in parts if part.start < start + room]
        if not parts:
            return False
        sequence.restores += 1
        self._begin(sequence, match, parts, location, compute_s(parts[0].start, parts[-1].end))
        return True

    def _begin(
        self,
        sequence: EngineSequence,
        match: Match,
        parts: list[RestoredPart],
        location: ChainLocation | None,
        compute_s: float,
    ) -> None:
        size, pool = self._pool.block_size, self._pool
        start, end = parts[0].start, parts[-1].end
        pool.acquire(match.blocks)
        now = self._clock()
        job = RestoreJob(
            root=sequence.root,
            hashes=sequence.hashes,
            ids=[tuple(sequence.ids[at * size : (at + 1) * size]) for at in range(start, end)],
            start=start,
            end=end,
            exact=sequence.spec.exact,
            held=list(match.blocks),
            blocks=pool.allocate(end - start),
            began=now,
            deadline=now + LATE * max(part.seconds for part in parts) + max(GRACE_S, SLACK * compute_s),
            compute_s=compute_s,
            waiting=[sequence],
        )
        self._jobs.append(job)
        job.running = [self._prepare(job, part, location) for part in parts]

    def start(self) -> None:
        """Begin to write to the blocks that jobs took from the pool. Not sooner than the step in which they were taken
        has made its copies: one of them may be what another sequence's first block is copied from."""
        unstarted, self._unstarted = self._unstarted, []
        for start in unstarted:
            start()

    def _prepare(self, job: RestoreJob, part: RestoredPart, location: ChainLocation | None) -> RunningPart:
        """Holds what a part needs, now; it begins with `start`."""
        blocks = job.blocks[part.start - job.start : part.end - job.start]
        if part.tier is Tier.HOST:
            return self._prepare_copy(job, part, blocks)
        assert self._remote is not None
        assert location is not None
        running = RunningPart(part, landing=Landing([None] * len(blocks), traceparent=location.traceparent))
        assert running.landing is not None
        targets = [self._memory.view(block) for block in blocks]
        addressable = [target for target in targets if target is not None]
        if len(addressable) < len(targets):
            addressable = self._stage(running, len(blocks))
        fetch = partial(
            self._remote.fetch,
            part.tier,
            location.names[part.start : part.start + len(addressable)],
            addressable,
            running.landing,
            exact=job.exact,
            peer=location.peer,
            on_progress=self._wake,
        )
        self._unstarted.append(fetch)
        return running

    def _prepare_copy(self, job: RestoreJob, part: RestoredPart, blocks: Sequence[int]) -> RunningPart:
        """Its slots, and the chain before them, are held while they are read."""
        assert self._host is not None
        chain = self._host.pool.chain_to(job.hashes[: part.end])
        self._host.pool.acquire(chain)
        moves = [
            partial(self._memory.write, block, self._host.view(slot))
            for block, slot in zip(blocks, chain[part.start :], strict=True)
        ]
        running = RunningPart(part, chain, CopyJob(moves, self._memory.block_bytes, self._wake))
        assert running.copy is not None
        self._unstarted.append(partial(self._copier.bring, running.copy))
        return running

    def _stage(self, running: RunningPart, count: int) -> list[memoryview]:
        """Slots of the host for blocks that the device's memory cannot be written with directly."""
        if self._host is None:
            return []
        running.slots = self._host.allocate(count)
        return [self._host.view(slot) for slot in running.slots]

    def preload(self, root: Root, hashes: Sequence[bytes], tier: Tier, peer: str, limit_s: float) -> int:
        """Bring a chain from vaults or a peer before anybody asks for it. Returns how many blocks are on their way."""
        held = self._pool.chain_to(hashes)
        start = len(held)
        count = min(len(hashes) - start, self._pool.available - self._pool.idle_among(held))
        if self._remote is None or count <= 0:
            return 0
        hashes = list(hashes[: start + count])
        self._pool.acquire(held)
        now = self._clock()
        blocks = self._pool.allocate(count)
        part = RestoredPart(tier, start, start + count, limit_s)
        job = RestoreJob(
            root=root,
            hashes=hashes,
            ids=[()] * count,
            start=start,
            end=start + count,
            exact=False,
            held=held,
            blocks=blocks,
            began=now,
            deadline=now + limit_s,
            compute_s=limit_s,
            ahead=True,
        )
        self._jobs.append(job)
        location = ChainLocation(names_of(root, hashes, (), self._pool.block_size), Finding(True), peer)
        job.running = [self._prepare(job, part, location)]
        return count

    @property
    def preloading(self) -> bool:
        return any(job.ahead for job in self._jobs)

    def _bring_staged(self, job: RestoreJob, running: RunningPart) -> None:
        """What has landed on the host goes on to the device."""
        if not running.staged or running.copy is not None:
            return
        assert running.landing is not None
        assert self._host is not None
        if not running.landing.ended:
            return
        blocks = job.blocks[running.part.start - job.start :]
        pairs = zip(blocks, running.slots[: running.landing.close()], strict=False)
        moves = [partial(self._memory.write, block, self._host.view(slot)) for block, slot in pairs]
        running.copy = CopyJob(moves, self._memory.block_bytes, self._wake)
        self._copier.bring(running.copy)

    # ------------------------------------------------------------------ end

    def poll(self) -> list[EngineSequence]:
        """Sequences whose turn may come again."""
        self.start()
        if not self._jobs and not self._looking:
            return []
        now = self._clock()
        back: list[EngineSequence] = []
        for key, (sequence, deadline) in list(self._looking.items()):
            location = sequence.spec.location
            assert location is not None
            if location.finding.ready or now >= deadline:
                location.finding.ready = True  # what is not known by now is not waited for
                back.append(sequence)
                del self._looking[key]
        for job in list(self._jobs):
            for running in job.running:
                self._bring_staged(job, running)
            if not all(running.ended for running in job.running):
                wanted = bool(job.waiting) or job.ahead
                if wanted and now < job.deadline:
                    continue
                arrived = sum(running.arrived for running in job.running)
                missing, elapsed = job.end - job.start - arrived, now - job.began
                block_s = job.compute_s / (job.end - job.start)
                if wanted and is_worth_going_on(missing, arrived, elapsed, block_s=block_s):
                    job.deadline = now + LATE * missing * elapsed / arrived
                    continue
                for running in job.running:
                    if not running.ended:
                        self.failures_total[running.part.tier, "late" if wanted else "unwanted"] += 1
            self._jobs.remove(job)
            back += self._finish(job, now)
        return back

    def due_in(self) -> float | None:
        """Seconds until `poll` has to be called though nothing woke the engine; None: no need."""
        due = [job.deadline for job in self._jobs] + [deadline for _, deadline in self._looking.values()]
        return max(0.0, min(due) - self._clock()) if due else None

    def drop(self, sequence: EngineSequence) -> None:
        """It does not wait any more."""
        self._looking.pop(id(sequence), None)
        for job in self._jobs:
            if sequence in job.waiting:
                job.waiting.remove(sequence)

    def _finish(self, job: RestoreJob, now: float) -> list[EngineSequence]:
        pool, size = self._pool, self._pool.block_size
        came: list[Arrived] = []  # block by block without a gap
        by_tier: Counter[Tier] = Counter()
        for running in job.running:
            arrived = self._end(running, job, job.blocks[running.part.start - job.start :])
            tier, wanted = running.part.tier, running.part.end - running.part.start
            self.seconds_total[tier] += now - job.began
            if len(came) == running.part.start - job.start:
                came += arrived
                self.restores_total[tier] += bool(arrived)
                if arrived:
                    by_tier[tier] += len(arrived)
            if len(arrived) < wanted:
                job.came_short(tier, running.part.start + len(arrived))
            failure = running.landing.failure if running.landing is not None and len(arrived) < wanted else ""
            if failure:
                self.failures_total[tier, failure] += 1
            for sequence in job.waiting:
                if (trace := sequence.spec.trace) is not None:
                    nbytes = len(arrived) * self._memory.block_bytes
                    trace.restores.append(Restored(tier, job.began, now, wanted, len(arrived), nbytes, failure))
        self._memory.landed(job.blocks[: len(came)])
        if job.held and not pool.lists_block(job.held[-1]):
            came = []  # what comes before them was thrown away meanwhile
        is_lossy = bool(came and job.held) and pool.content(job.held[-1]).lossy
        for at, one in enumerate(came):
            block_hash = job.hashes[job.start + at]
            if job.exact and pool.is_lossy(block_hash):
                break  # somebody computed it on lossy ones meanwhile: exact ones are not listed beside them
            is_lossy = is_lossy or one.lossy
            job.ids[at] = job.ids[at] or one.ids
            job.blocks[at] = pool.fill(
                job.blocks[at], job.root, job.hashes, job.start + at, job.ids[at], lossy=is_lossy
            )
            is_lossy = is_lossy or pool.is_lossy(block_hash)
        pool.release([*job.held, *job.blocks])
        if came and not is_lossy:
            self._sample(job, len(came))
        for tier, blocks in by_tier.items():
            self.tokens_total[tier] += blocks * size
            for sequence in job.waiting[:1]:  # who came later found them
                sequence.restored[tier] = sequence.restored.get(tier, 0) + blocks * size
        return job.waiting

    def _sample(self, job: RestoreJob, count: int) -> None:
        """Every so many restores of exact blocks one is noted, to be checked when there is nothing to do."""
        self._exact_restores += 1
        if self._exact_restores % self.sampled:
            return
        self.samples.append(job.sample(count))

    def _end(self, running: RunningPart, job: RestoreJob, blocks: Sequence[int]) -> list[Arrived]:
        """Stop a part. Returns what came."""
        done = running.copy.close() if running.copy is not None else 0
        if running.landing is None:
            assert self._host is not None
            slots = running.slots[running.part.start : running.part.start + done]
            contents = [self._host.pool.content(slot) for slot in slots if self._host.pool.lists_block(slot)]
            self._host.pool.release(running.slots)
            return [Arrived(content.lossy, content.ids) for content in contents]
        arrived = running.landing.close()
        if running.staged:
            assert self._host is not None
            self._host.pool.release(running.slots)
            arrived = done
        headers = [header for header in running.landing.headers[:arrived] if header is not None]
        return [Arrived(header.lossy, unpack_ids(header.ids)) for header in headers]

    # ------------------------------------------------------------------ queries

    def held(self) -> list[list[int]]:
        """Blocks of the device that jobs hold, by holder."""
        return [[*job.held, *job.blocks] for job in self._jobs]

    def carried(self) -> list[bytes]:
        """Last blocks of chains on their way up, and so held."""
        return [job.hashes[job.end - 1] for job in self._jobs]

    def held_on_host(self) -> list[list[int]]:
        return [running.slots for job in self._jobs for running in job.running if running.slots]

    @property
    def waiting(self) -> int:
        return len(self._looking) + sum(len(job.waiting) for job in self._jobs)
