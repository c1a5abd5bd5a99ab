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

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from kvfleet.worker.tiers.host import Copier, CopyJob, HostTier
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


@dataclass(eq=False, slots=True)
class Restorer:
    """`wake` is called, from any thread, when there is something to poll."""

    pool: BlockPool
    memory: BlockMemory
    host: HostTier
    copier: Copier
    remote: RemoteTiers | None
    wake: Callable[[], None]
    clock: Callable[[], float]
    tokens_total: Counter[Tier] = field(default_factory=Counter)
    restores_total: Counter[Tier] = field(default_factory=Counter)
    seconds_total: dict[Tier, float] = field(default_factory=lambda: dict.fromkeys(Tier, 0.0))
    failures_total: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    samples: deque[RestoreSample] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    sampled: int = SAMPLED
    _exact_restores: int = 0
    _jobs: list[RestoreJob] = field(default_factory=list)
    _looking: dict[int, tuple[EngineSequence, float]] = field(default_factory=dict)
    _unstarted: list[Callable[[], None]] = field(default_factory=list)

    # ------------------------------------------------------------------ begin

    def claims(self, sequence: EngineSequence, match: Match, *, spare: int, compute_s: ComputeSeconds) -> bool:
        """Whether the sequence, whose turn it is, is to wait for blocks that are on their way now.

        `spare` blocks of the pool are left to those who run.
        """
        size = self.pool.block_size
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
        price = partial(cheapest, start=start, block_bytes=self.memory.block_bytes, compute_s=compute_s)
        offers = host_offers(self.host, self.copier.speed_in.bytes_per_s, sequence, start, usable)
        if location is not None:
            assert self.remote is not None
            found = location.finding
            if found.ready:
                offers += remote_offers(self.remote, location, min(found.vault, usable), min(found.peer, usable))
            else:
                left = max((offer.end for offer in offers), default=start)
                best = price(offers + remote_offers(self.remote, location, usable, usable, hopes=True))
                is_worth = compute_s(left, usable) > look_worth_s(location)
                if is_worth and best and best[-1].tier is not Tier.HOST:
                    self._looking[id(sequence)] = sequence, self.clock() + answer_limit_s(location)
                    return True
        parts = price(offers)
        room = self.pool.available - self.pool.idle_among(match.blocks) - spare
        parts = [part._replace(end=min(part.end, start + room)) for part in parts if part.start < start + room]
        if not parts:
            return False
        sequence.restores += 1
        start, end = parts[0].start, parts[-1].end
        saved_s, now = compute_s(start, end), self.clock()
        job = RestoreJob(
            root=sequence.root,
            hashes=sequence.hashes,
            ids=[tuple(sequence.ids[at * size : (at + 1) * size]) for at in range(start, end)],
            start=start,
            end=end,
            exact=exact,
            held=match.blocks,
            began=now,
            deadline=now + LATE * max(part.seconds for part in parts) + max(GRACE_S, SLACK * saved_s),
            compute_s=saved_s,
            waiting=[sequence],
        )
        self._begin(job, parts, location)
        return True

    def preload(self, root: Root, hashes: Sequence[bytes], tier: Tier, peer: str, limit_s: float) -> int:
        """Bring a chain from vaults or a peer before anybody asks for it. Returns how many blocks are on their way."""
        held = self.pool.chain_to(hashes)
        start = len(held)
        count = min(len(hashes) - start, self.pool.available - self.pool.idle_among(held))
        if self.remote is None or count <= 0:
            return 0
        hashes, now = list(hashes[: start + count]), self.clock()
        job = RestoreJob(
            root=root,
            hashes=hashes,
            ids=[()] * count,
            start=start,
            end=start + count,
            exact=False,
            held=held,
            began=now,
            deadline=now + limit_s,
            compute_s=limit_s,
            ahead=True,
        )
        location = ChainLocation(names_of(root, hashes, (), self.pool.block_size), Finding(True), peer)
        self._begin(job, [RestoredPart(tier, start, start + count, limit_s)], location)
        return count

    def _begin(self, job: RestoreJob, parts: list[RestoredPart], location: ChainLocation | None) -> None:
        """Hold what the job needs, now; its parts begin with `start`."""
        self.pool.acquire(job.held)
        job.blocks = self.pool.allocate(job.end - job.start)
        self._jobs.append(job)
        job.running = [self._prepare(job, part, location) for part in parts]

    def start(self) -> None:
        """Begin to write to the blocks that jobs took from the pool. Not sooner than the step in which they were taken
        has made its copies: one of them may be what another sequence's first block is copied from."""
        unstarted, self._unstarted = self._unstarted, []
        for start in unstarted:
            start()

    def _prepare(self, job: RestoreJob, part: RestoredPart, location: ChainLocation | None) -> RunningPart:
        blocks = job.blocks[part.start - job.start : part.end - job.start]
        if part.tier is Tier.HOST:  # its slots, and the chain before them, are held while they are read
            chain = self.host.pool.chain_to(job.hashes[: part.end])
            self.host.pool.acquire(chain)
            copy = self._copy(blocks, chain[part.start :])
            self._unstarted.append(partial(self.copier.bring, copy))
            return RunningPart(part, chain, copy)
        assert self.remote is not None
        assert location is not None
        landing = Landing([None] * len(blocks), traceparent=location.traceparent)
        running = RunningPart(part, landing=landing)
        targets = [view for block in blocks if (view := self.memory.view(block)) is not None]
        if len(targets) < len(blocks):  # the device's memory cannot be written to directly: it lands on the host first
            running.slots = self.host.allocate(len(blocks))
            targets = [self.host.view(slot) for slot in running.slots]
        fetch = partial(
            self.remote.fetch,
            part.tier,
            location.names[part.start : part.start + len(targets)],
            targets,
            landing,
            exact=job.exact,
            peer=location.peer,
            on_progress=self.wake,
        )
        self._unstarted.append(fetch)
        return running

    def _copy(self, blocks: Sequence[int], slots: Sequence[int]) -> CopyJob:
        pairs = zip(blocks, slots, strict=True)
        moves = [partial(self.memory.write, block, self.host.view(slot)) for block, slot in pairs]
        return CopyJob(moves, self.memory.block_bytes, self.wake)

    @property
    def preloading(self) -> bool:
        return any(job.ahead for job in self._jobs)

    def _bring_staged(self, job: RestoreJob, running: RunningPart) -> None:
        """What has landed on the host goes on to the device."""
        if running.landing is None or not running.landing.ended or not running.slots or running.copy is not None:
            return
        first, landed = running.part.start - job.start, running.landing.close()
        running.copy = self._copy(job.blocks[first : first + landed], running.slots[:landed])
        self.copier.bring(running.copy)

    # ------------------------------------------------------------------ end

    def poll(self) -> list[EngineSequence]:
        """Sequences whose turn may come again."""
        self.start()
        if not self._jobs and not self._looking:
            return []
        now = self.clock()
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
        return max(0.0, min(due) - self.clock()) if due else None

    def drop(self, sequence: EngineSequence) -> None:
        """It does not wait any more."""
        self._looking.pop(id(sequence), None)
        for job in self._jobs:
            if sequence in job.waiting:
                job.waiting.remove(sequence)

    def _finish(self, job: RestoreJob, now: float) -> list[EngineSequence]:
        pool, size = self.pool, self.pool.block_size
        came: list[Arrived] = []  # block by block without a gap
        by_tier: Counter[Tier] = Counter()
        for running in job.running:
            arrived = self._end(running)
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
                    nbytes = len(arrived) * self.memory.block_bytes
                    trace.restores.append(Restored(tier, job.began, now, wanted, len(arrived), nbytes, failure))
        self.memory.landed(job.blocks[: len(came)])
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
            self._exact_restores += 1
            if self._exact_restores % self.sampled == 0:
                self.samples.append(job.sample(len(came)))
        for tier, blocks in by_tier.items():
            self.tokens_total[tier] += blocks * size
            for sequence in job.waiting[:1]:  # who came later found them
                sequence.restored[tier] = sequence.restored.get(tier, 0) + blocks * size
        return job.waiting

    def _end(self, running: RunningPart) -> list[Arrived]:
        """Stop a part. Returns what came."""
        done = running.copy.close() if running.copy is not None else 0
        if running.landing is None:
            slots = running.slots[running.part.start : running.part.start + done]
            contents = [self.host.pool.content(slot) for slot in slots if self.host.pool.lists_block(slot)]
            self.host.pool.release(running.slots)
            return [Arrived(content.lossy, content.ids) for content in contents]
        arrived = running.landing.close()
        if running.staged:
            self.host.pool.release(running.slots)
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
