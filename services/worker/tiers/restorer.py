"""Brings blocks up to the device before a sequence runs. Read `claims`, then `poll`. The engine's thread owns it.

    a sequence's turn ──claims──▶ looks ──▶ its turn again
                            │                                      ┌ all came, or what came is enough ┐
                            └──▶ a job: blocks of the pool are taken, copies and fetches run beside steps
                                                                   └ poll: they are listed, its turn again

Nothing here waits. A job holds the chain that is on the device already and the blocks that its parts land in; when it
ends, at its deadline at the latest, blocks that arrived without a gap are listed like computed ones.
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
from kvfleet.worker.port.sequence_spec import Restored
from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.break_even import ComputeSeconds, RestoredPart
from kvfleet.worker.tiers.host import Copier, CopyJob, HostTier, Landing
from kvproto.block_hash import Root, unpack_ids
from kvproto.messages import Tier

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets

SAMPLED = 32  # one restore in so many is checked by computing
MOST_SAMPLES = 16
MOST_RESTORES = 2  # for one sequence before it runs
LATE = 1.5  # a job's deadline: times its predicted seconds,
SLACK = 0.2  # and that part of the seconds of computing,
GRACE_S = 0.005  # or this, if that is more

Arrived = tuple[bool, tuple[int, ...]]  # whether a block is lossy, and its tokens


@dataclass(frozen=True, slots=True)
class RestoreSample:
    """A restored chain, to compute its last block again. `source`: the vault or peer of blocks from `start` on, "" the
    host."""

    root: Root
    hashes: Sequence[bytes]
    ids: tuple[int, ...]  # of the last block
    start: int
    tier: Tier
    source: str


@dataclass(slots=True)
class RunningPart:
    """A part under way: from the host by the copier, else through a landing."""

    part: RestoredPart
    slots: list[int] = field(default_factory=list)  # of the host, held: where it is copied from, or staged in
    copy: CopyJob | None = None
    landing: Landing | None = None

    @property
    def arrived(self) -> int:
        """Blocks so far, gaps or not; once the copy of blocks staged on the host has begun, those that it made."""
        if self.copy is not None:
            return self.copy.done
        return 0 if self.landing is None else sum(header is not None for header in self.landing.headers)

    @property
    def ended(self) -> bool:
        if self.copy is not None:
            return self.copy.ended
        return self.landing is not None and self.landing.ended and not self.slots


@dataclass(slots=True)
class RestoreJob:
    root: Root
    hashes: Sequence[bytes]
    held: Sequence[int]  # the chain before the job's blocks, on the device
    ids: list[tuple[int, ...]]  # of each block; empty where they are not known
    exact: bool
    began: float
    deadline: float
    compute_s: float  # what computing them would take
    blocks: list[int] = field(default_factory=list)  # where they go
    running: list[RunningPart] = field(default_factory=list)
    waiting: list[EngineSequence] = field(default_factory=list)
    ahead: bool = False  # for sequences to come
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = len(self.held)
        self.end = self.start + len(self.ids)

    def came_short(self, tier: Tier, depth: int) -> None:
        """Only `depth` of the blocks that were found in `tier` can be had: the rest is not tried again."""
        for location in [sequence.spec.location for sequence in self.waiting]:
            if location is not None and tier is Tier.VAULT:
                location.finding.vault = min(location.finding.vault, depth)
            elif location is not None and tier is Tier.PEER:
                location.finding.peer = min(location.finding.peer, depth)

    def sample(self, count: int) -> RestoreSample:
        at = self.start + count - 1
        last = next(running for running in self.running if running.part.start <= at < running.part.end)
        source = last.landing.sources.get(at - last.part.start, "") if last.landing is not None else ""
        hashes = list(self.hashes[: at + 1])
        return RestoreSample(self.root, hashes, self.ids[count - 1], last.part.start, last.part.tier, source)


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

    def claims(self, sequence: EngineSequence, match: Match, *, spare: int, compute_s: ComputeSeconds) -> bool:
        """Whether the sequence, whose turn it is, has to wait for blocks. `spare` blocks are left to running ones."""
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
        location = break_even.location_of(sequence)
        compute_s = break_even.price_of_computing(location, compute_s)
        price = partial(break_even.cheapest, start=start, block_bytes=self.memory.block_bytes, compute_s=compute_s)
        offers = break_even.host_offers(self.host, self.copier.speed_in.bytes_per_s, sequence, start, usable)
        if location is not None:
            assert self.remote is not None
            found = location.finding
            if found.ready:
                offers += break_even.remote_offers(
                    self.remote, location, min(found.vault, usable), min(found.peer, usable)
                )
            else:
                left = max((offer.end for offer in offers), default=start)
                best = price(offers + break_even.remote_offers(self.remote, location, usable, usable, hopes=True))
                worth_s = break_even.FAR_WORTH_S if location.far else break_even.LOOK_WORTH_S
                is_worth = compute_s(left, usable) > worth_s
                if is_worth and best and best[-1].tier is not Tier.HOST:
                    self._looking[id(sequence)] = sequence, self.clock() + break_even.answer_limit_s(location)
                    return True
        parts = price(offers)
        room = self.pool.available - self.pool.idle_among(match.blocks) - spare
        parts = [part._replace(end=min(part.end, start + room)) for part in parts if part.start < start + room]
        if not parts:
            return False
        sequence.restores += 1
        end, now = parts[-1].end, self.clock()
        saved_s = compute_s(start, end)
        deadline = now + LATE * max(part.seconds for part in parts) + max(GRACE_S, SLACK * saved_s)
        ids = [tuple(sequence.ids[at * size : (at + 1) * size]) for at in range(start, end)]
        job = RestoreJob(sequence.root, sequence.hashes, match.blocks, ids, exact, now, deadline, saved_s)
        job.waiting.append(sequence)
        self._begin(job, parts, location)
        return True

    def preload(self, root: Root, hashes: Sequence[bytes], tier: Tier, peer: str, limit_s: float) -> int:
        """Bring a chain from vaults or a peer ahead of requests. Returns how many blocks are on their way."""
        held = self.pool.chain_to(hashes)
        start = len(held)
        count = min(len(hashes) - start, self.pool.available - self.pool.idle_among(held))
        if self.remote is None or count <= 0:
            return 0
        hashes, now = list(hashes[: start + count]), self.clock()
        job = RestoreJob(root, hashes, held, [()] * count, False, now, now + limit_s, compute_s=limit_s, ahead=True)
        location = ChainLocation(names_of(root, hashes, (), self.pool.block_size), Finding(True), peer)
        self._begin(job, [RestoredPart(tier, start, start + count, limit_s)], location)
        return count

    def _begin(self, job: RestoreJob, parts: list[RestoredPart], location: ChainLocation | None) -> None:
        self.pool.acquire(job.held)
        job.blocks = self.pool.allocate(job.end - job.start)
        self._jobs.append(job)
        job.running = [self._prepare(job, part, location) for part in parts]

    def start(self) -> None:
        """Begin to write to the blocks that jobs took from the pool: only after that step has made its copies, as one
        of them may be the source of a copy."""
        unstarted, self._unstarted = self._unstarted, []
        for start in unstarted:
            start()

    def _prepare(self, job: RestoreJob, part: RestoredPart, location: ChainLocation | None) -> RunningPart:
        blocks = job.blocks[part.start - job.start : part.end - job.start]
        if part.tier is Tier.HOST:  # its slots, and the chain before them, are held while they are read
            chain = self.host.pool.chain_to(job.hashes[: part.end])
            self.host.pool.acquire(chain)
            copy = self.host.copy_job(self.memory.write_blocks, blocks, chain[part.start :], self.wake)
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

    @property
    def preloading(self) -> bool:
        return any(job.ahead for job in self._jobs)

    def _bring_staged(self, job: RestoreJob, running: RunningPart) -> None:
        if running.landing is None or not running.landing.ended or not running.slots or running.copy is not None:
            return
        first, landed = running.part.start - job.start, running.landing.close()
        blocks, slots = job.blocks[first : first + landed], running.slots[:landed]
        running.copy = self.host.copy_job(self.memory.write_blocks, blocks, slots, self.wake)
        self.copier.bring(running.copy)

    def poll(self) -> list[EngineSequence]:
        """Returns sequences whose turn may come again."""
        self.start()
        if not self._jobs and not self._looking:
            return []
        now = self.clock()
        back: list[EngineSequence] = []
        for key, (sequence, deadline) in list(self._looking.items()):
            location = sequence.spec.location
            assert location is not None
            if location.finding.ready or now >= deadline:
                location.finding.ready = True  # later answers are not waited for
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
                if wanted and break_even.is_worth_going_on(missing, arrived, elapsed, block_s=block_s):
                    job.deadline = now + LATE * missing * elapsed / arrived
                    continue
                for running in job.running:
                    if not running.ended:
                        self.failures_total[running.part.tier, "late" if wanted else "unwanted"] += 1
            self._jobs.remove(job)
            back += self._finish(job, now)
        return back

    def due_in(self) -> float | None:
        """Seconds until `poll` has to be called even if nothing wakes the engine."""
        due = [job.deadline for job in self._jobs] + [deadline for _, deadline in self._looking.values()]
        return max(0.0, min(due) - self.clock()) if due else None

    def drop(self, sequence: EngineSequence) -> None:
        self._looking.pop(id(sequence), None)
        for job in self._jobs:
            if sequence in job.waiting:
                job.waiting.remove(sequence)

    def _finish(self, job: RestoreJob, now: float) -> list[EngineSequence]:
        pool = self.pool
        came: list[Arrived] = []  # block by block without a gap
        for running in job.running:
            arrived = self._end(running)
            tier, wanted = running.part.tier, running.part.end - running.part.start
            self.seconds_total[tier] += now - job.began
            if len(came) == running.part.start - job.start:
                came += arrived
                tokens = len(arrived) * pool.block_size
                self.restores_total[tier] += bool(arrived)
                self.tokens_total[tier] += tokens
                for sequence in job.waiting[: bool(arrived)]:  # the first; others found them
                    sequence.restored[tier] = sequence.restored.get(tier, 0) + tokens
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
        if job.held and job.held[-1] not in pool.index:
            came = []  # the chain before them was thrown away meanwhile
        is_lossy = bool(came and job.held) and pool.index[job.held[-1]].lossy
        for at, (lossy, ids) in enumerate(came):
            block_hash = job.hashes[job.start + at]
            if job.exact and pool.is_lossy(block_hash):
                break  # it was computed on lossy ones meanwhile: exact ones are not listed beside them
            is_lossy = is_lossy or lossy
            job.ids[at] = job.ids[at] or ids
            job.blocks[at] = pool.fill(
                job.blocks[at], job.root, job.hashes, job.start + at, job.ids[at], lossy=is_lossy
            )
            is_lossy = is_lossy or pool.is_lossy(block_hash)
        pool.release([*job.held, *job.blocks])
        if came and not is_lossy:
            self._exact_restores += 1
            if self._exact_restores % self.sampled == 0:
                self.samples.append(job.sample(len(came)))
        return job.waiting

    def _end(self, running: RunningPart) -> list[Arrived]:
        done = running.copy.close() if running.copy is not None else 0
        if running.landing is None:
            slots = running.slots[running.part.start : running.part.start + done]
            contents = [self.host.pool.index[slot] for slot in slots if slot in self.host.pool.index]
            self.host.pool.release(running.slots)
            return [(content.lossy, content.ids) for content in contents]
        arrived = running.landing.close()
        if running.slots:
            self.host.pool.release(running.slots)
            arrived = done
        headers = [header for header in running.landing.headers[:arrived] if header is not None]
        return [(header.lossy, unpack_ids(header.ids)) for header in headers]

    def held(self) -> list[list[int]]:
        """Blocks of the device that jobs hold, by holder."""
        return [[*job.held, *job.blocks] for job in self._jobs]

    def carried(self) -> list[bytes]:
        """Last blocks of chains that are held on their way up."""
        return [job.hashes[job.end - 1] for job in self._jobs]

    def held_on_host(self) -> list[list[int]]:
        return [running.slots for job in self._jobs for running in job.running if running.slots]

    @property
    def waiting(self) -> int:
        return len(self._looking) + sum(len(job.waiting) for job in self._jobs)
