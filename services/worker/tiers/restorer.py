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
from kvfleet.worker.tiers.break_even import LATE, SLACK, ComputeSeconds, Offer, RestoredPart
from kvfleet.worker.tiers.host import Copier, HostTier, Landing
from kvfleet.worker.tiers.link_speed import LinkSpeed
from kvfleet.worker.tiers.restore_job import RestoreJob, RestoreSample, RunningPart
from kvproto.block_hash import Root, unpack_ids
from kvproto.messages import Tier

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets

SAMPLED = 32  # one restore in so many is checked by computing
MOST_SAMPLES = 16
MOST_RESTORES = 2  # for one sequence before it runs
GRACE_S = 0.005  # of a job's deadline, if its share of the seconds of computing is less

Arrived = tuple[bool, tuple[int, ...]]  # whether a block is lossy, and its tokens


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

    def claims(
        self, sequence: EngineSequence, match: Match, *, spare: int, compute_s: ComputeSeconds, end: int | None = None
    ) -> bool:
        """Whether the sequence, whose turn it is, has to wait for blocks. `spare` blocks are left to running ones. Of
        the first `end` blocks, if given, all are brought or none."""
        size = self.pool.block_size
        start, usable = len(match.blocks), (len(sequence.ids) - 1) // size if end is None else end
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
        if self.looks(sequence, start, usable, compute_s):
            return True
        parts = self.parts(sequence, match, usable, spare=spare, compute_s=compute_s)
        if not parts or (end is not None and parts[-1].end < end):
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

    def looks(self, sequence: EngineSequence, start: int, usable: int, compute_s: ComputeSeconds) -> bool:
        """Whether the sequence has to wait for what vaults and a peer say of blocks `start` to `usable`."""
        location = break_even.location_of(sequence)
        if location is None or location.finding.ready:
            return False
        assert self.remote is not None
        offers = self._host_offers(sequence, start, usable)
        left = max((offer.end for offer in offers), default=start)
        offers += break_even.remote_offers(self.remote, location, usable, usable, hopes=True)
        best = break_even.cheapest(offers, start, block_bytes=self.memory.block_bytes, compute_s=compute_s)
        worth_s = break_even.FAR_WORTH_S if location.far else break_even.LOOK_WORTH_S
        if compute_s(left, usable) <= worth_s or not best or best[-1].tier is Tier.HOST:
            return False
        self._looking[id(sequence)] = sequence, self.clock() + break_even.answer_limit_s(location)
        return True

    def parts(
        self, sequence: EngineSequence, match: Match, usable: int, *, spare: int, compute_s: ComputeSeconds
    ) -> list[RestoredPart]:
        """What to restore of the sequence's blocks behind the match, up to `usable`, from where."""
        start, location = len(match.blocks), break_even.location_of(sequence)
        offers = self._host_offers(sequence, start, usable)
        if location is not None and location.finding.ready:
            assert self.remote is not None
            vault, peer = min(location.finding.vault, usable), min(location.finding.peer, usable)
            offers += break_even.remote_offers(self.remote, location, vault, peer)
        parts = break_even.cheapest(offers, start, block_bytes=self.memory.block_bytes, compute_s=compute_s)
        room = self.pool.available - self.pool.idle_among(match.blocks) - spare
        return [part._replace(end=min(part.end, start + room)) for part in parts if part.start < start + room]

    def _host_offers(self, sequence: EngineSequence, start: int, usable: int) -> list[Offer]:
        return break_even.host_offers(self.host, self.copier.speed_in.bytes_per_s, sequence, start, usable)

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

    def bring_up(
        self,
        root: Root,
        hashes: Sequence[bytes],
        room: int,
        compute_s: ComputeSeconds,
        on_end: Callable[[int, float], None],
    ) -> int:
        """Bring a chain from the host and vaults ahead of its next turn, as far as `room` goes and that is quicker than
        computing it. Returns how many blocks are on their way."""
        held = self.pool.chain_to(hashes)
        start = len(held)
        end = min(len(hashes), start + max(0, room - self.pool.idle_among(held)))
        depth, rate = self.host.depth(hashes, start, end), self.copier.speed_in.bytes_per_s
        offers = [Offer(Tier.HOST, depth, LinkSpeed(0.0, rate))] if rate else []
        if self.remote is not None and (speed := self.remote.speed(Tier.VAULT)) is not None:
            offers.append(Offer(Tier.VAULT, end, speed))
        parts = break_even.cheapest(offers, start, block_bytes=self.memory.block_bytes, compute_s=compute_s)
        if not parts:
            return 0
        hashes, now, seconds = list(hashes[: parts[-1].end]), self.clock(), sum(part.seconds for part in parts)
        ids: list[tuple[int, ...]] = [()] * (len(hashes) - start)
        saved_s = compute_s(start, len(hashes))
        deadline = now + LATE * seconds + max(GRACE_S, SLACK * saved_s)
        job = RestoreJob(root, hashes, held, ids, False, now, deadline, saved_s, ahead=True, on_end=on_end)
        self._begin(job, parts, ChainLocation(names_of(root, hashes, (), self.pool.block_size), Finding(True), ""))
        return len(ids)

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

    def brings(self, hashes: Sequence[bytes]) -> bool:
        """Whether a part of this chain is on its way ahead of requests."""
        return any(job.ahead and job.end <= len(hashes) and job.hashes[-1] == hashes[job.end - 1] for job in self._jobs)

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
                if wanted and (more_s := break_even.going_on_s(missing, arrived, elapsed, block_s=block_s)):
                    job.deadline = now + more_s
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
        if job.on_end is not None:
            job.on_end(len(came), now - job.began)
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
