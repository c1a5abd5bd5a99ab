"""All tiers below the device, as the engine sees them, and what it verifies of them. The engine's thread owns it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvfleet.worker.blocks.block_pool import BlockPool, Lendable, Match
from kvfleet.worker.blocks.chain_location import BlockName, names_of
from kvfleet.worker.blocks.pool_integrity import PoolAudit, check_integrity
from kvfleet.worker.model.base import BlockMemory, ModelRunner
from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.schedule.step_plan import Slice
from kvfleet.worker.tiers.host import Copier, HostTier
from kvfleet.worker.tiers.host_states import HostStates
from kvfleet.worker.tiers.offloader import Offloader, ReuseWatch
from kvfleet.worker.tiers.pauses import Pauses
from kvfleet.worker.tiers.protection import Protector
from kvfleet.worker.tiers.restore_job import RestoreSample
from kvfleet.worker.tiers.restorer import Restorer
from kvfleet.worker.tiers.state_tiers import StateTiers
from kvproto.block_hash import ForkedRoot, Root, own_root, root_at
from kvproto.errors import OutOfMemory
from kvproto.messages import Tier, TierLoad

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets

logger = logging.getLogger(__name__)

PROBE_BLOCKS = 4
PROBES = 3
NEVER = 2**62
MOST_ERASING = 1024  # sequences that wait for blocks that are on their way


@dataclass(eq=False)
class Tiers:
    """Without blocks in the `host` tier nothing is offloaded; vaults and peers are still read where blocks of the
    device have an address on the host. `wake` is called from any thread when there is something to maintain."""

    pool: BlockPool
    memory: BlockMemory
    host: HostTier
    remote: RemoteTiers | None
    wake: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    copier: Copier = field(default_factory=Copier)
    reuse: ReuseWatch = field(default_factory=ReuseWatch)
    lent: dict[int, list[tuple[BlockPool, list[int]]]] = field(default_factory=dict)  # chains for peers, by lending
    protector: Protector | None = None
    states: HostStates | None = None  # of a hybrid model
    snapshots: StateTiers | None = field(default=None, init=False)
    # what is to be forgotten once it has arrived, or is no longer used: whether that is so, and what forgets it
    _erasing: deque[tuple[Callable[[], bool], Callable[[], int]]] = field(
        default_factory=lambda: deque(maxlen=MOST_ERASING)
    )

    def __post_init__(self) -> None:
        parts = self.pool, self.memory, self.host, self.copier, self.remote
        self.restorer = Restorer(*parts, lambda: self.wake(), self.clock)
        self.offloader = Offloader(*parts, self.reuse, lambda: self.wake())
        self.pauses = Pauses(self.pool, self.host, self.copier, self.offloader, self.restorer, self.clock)
        self._audit = PoolAudit(self.host.pool)
        if (states := self.states) is not None:
            self.snapshots = StateTiers(
                states, self.restorer, self.offloader, self.remote, lambda: self.wake(), self.clock
            )
            self.restorer.sampled = NEVER  # a block alone cannot be computed again without the state before it
        if self.host.blocks and self.remote is not None:
            self.protector = Protector(self.pool, self.host, self.offloader, self.copier, self.remote)
        self._probe()

    def _probe(self) -> None:
        """Measure copies, so that the first request can price them. The pool is empty: its blocks may be written."""
        blocks = self.pool.allocate(min(PROBE_BLOCKS, self.pool.available, self.host.blocks))
        slots = self.host.allocate(len(blocks))
        ways = (self.memory.read_blocks, self.copier.speed_out), (self.memory.write_blocks, self.copier.speed_in)
        for number in range(1 + PROBES):
            for copy, speed in ways:
                job = self.host.copy_job(copy, blocks, slots, lambda: None)
                took = job.run()
                if number:  # the first touches the memory
                    speed.probed(job.done * self.host.block_bytes, took)
        self.pool.release(blocks)
        self.host.pool.release(slots)

    def close(self) -> None:
        self.copier.close()

    def started(self, sequence: EngineSequence) -> float:
        """Returns the seconds of restoring that were done while its conversation paused."""
        self.reuse.ask(own_root(sequence.root), sequence.hashes)
        return self.pauses.returned(sequence)

    def _drop(self, sequence: EngineSequence) -> None:
        self.restorer.drop(sequence)
        if self.snapshots is not None:
            self.snapshots.drop(sequence)

    def leaves(self, sequence: EngineSequence, prefill_tokens_per_s: float) -> None:
        self._drop(sequence)
        if sequence.filled:
            self.reuse.extend(sequence.hashes[: sequence.filled])
            location = sequence.spec.location
            if location is not None and location.finding.ready:  # a vault may have lost what it was given
                self.offloader.missed(sequence.hashes[location.finding.vault :])
                if self.snapshots is not None:
                    self.snapshots.missed(location)
            self.offloader.offer(sequence, prefill_tokens_per_s)
            self.pauses.ended(sequence)

    def paused(self, sequence: EngineSequence) -> None:
        """The sequence is about to release its blocks until its client reads on."""
        self._drop(sequence)
        if sequence.filled:
            self.offloader.offer(sequence, 0.0, reused=True)

    def claims(
        self, sequence: EngineSequence, match: Match, spare: int, compute_s: Callable[[int, int], float]
    ) -> bool:
        """Whether the sequence has to wait, out of the queue, until `maintain` returns it. `compute_s`: seconds to
        compute tokens, by position and count."""
        size = self.pool.block_size
        claims = self.restorer.claims if self.snapshots is None else self.snapshots.claims
        return claims(
            sequence, match, spare=spare, compute_s=lambda start, end: compute_s(start * size, (end - start) * size)
        )

    def maintain(self) -> list[EngineSequence]:
        """Called between steps. Returns sequences that go back to the queue."""
        self.offloader.maintain()
        self.pauses.maintain()
        for _ in range(len(self._erasing)):
            is_due, erase = self._erasing.popleft()
            if is_due():
                erase()
            else:
                self._erasing.append((is_due, erase))
        back = [] if self.snapshots is None else self.snapshots.maintain(self.copier)
        return back + self.restorer.poll()

    def copied(self) -> None:
        """This step's copies between blocks are made: blocks taken from the pool may be written."""
        self.restorer.start()

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int = 0) -> int:
        """Forget, in every tier, the blocks that only this token sequence has behind its first `keep` tokens; those on
        their way, when they have arrived. Returns how many went at once."""
        has_arrived = partial(self._has_arrived, frozenset(hashes))
        if not has_arrived():
            self.erase_once(has_arrived, root, hashes, ids, keep)
        gone = self.pool.erase(root, hashes, ids, keep)
        first = max(keep // self.pool.block_size, root.blocks if isinstance(root, ForkedRoot) else 0)
        self.offloader.forget(hashes[first:])
        self.pauses.forget(hashes[first:])
        gone += self.host.erase(root, hashes, ids, keep)
        if self.snapshots is not None:
            pools = self.pool, self.host.pool
            gone_from = [one for one in hashes[first:] if not any(pool.index.lists(one) for pool in pools)]
            self.snapshots.forget(gone_from)
            self.snapshots.host.slots.erase(root, hashes, ids, keep, self.pool.index)
        if self.remote is not None and len(hashes) > first:
            self.remote.erase(names_of(root, hashes, ids, self.pool.block_size)[first:])
        return gone

    def erase_once(
        self, is_due: Callable[[], bool], root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int
    ) -> None:
        """As `erase`, later."""
        self._erasing.append((is_due, partial(self.erase, root, hashes, ids, keep)))

    def _has_arrived(self, known: frozenset[bytes]) -> bool:
        return known.isdisjoint(self._carried())

    def discard(self, root: Root, hashes: Sequence[bytes]) -> None:
        """The last block's content is wrong: drop it and all that continues it, here, in vaults and on the way."""
        first = hashes[-1]
        gone = {first: root_at(root, len(hashes) - 1)} | self.pool.continuations(first)
        gone |= self.host.pool.continuations(first)
        self.host.drop(first)
        self.pool.drop(first)
        self.offloader.forget(list(gone))
        if self.snapshots is not None:
            self.snapshots.forget(gone)
        if self.remote is not None:
            self.remote.erase([BlockName(kept_under, block_hash, b"", b"") for block_hash, kept_under in gone.items()])

    def _carried(self) -> list[bytes]:
        """Last blocks of chains that tiers or peers hold, not sequences."""
        lent = [(pool, chain[-1]) for held in self.lent.values() for pool, chain in held]
        ends = [pool.index[last].hash for pool, last in lent if last in pool.index]
        return [end for end in ends if end] + self.offloader.carried() + self.restorer.carried()

    @property
    def waiting(self) -> int:
        """Sequences that wait for what is on its way up."""
        return self.restorer.waiting + (0 if self.snapshots is None else self.snapshots.waiting)

    @property
    def is_settled(self) -> bool:
        """Whether the host has all that was offered, and vaults have answered for it."""
        return self.offloader.is_settled and (self.snapshots is None or self.snapshots.is_settled)

    def due_in(self) -> float | None:
        """Seconds until `maintain` has to be called for what is on its way up, even if nothing wakes the engine."""
        due = self.restorer.due_in(), None if self.snapshots is None else self.snapshots.due_in()
        return min((one for one in due if one is not None), default=None)

    def rates(self) -> dict[str, float]:
        found = {Tier.HOST: self.copier.speed_in.bytes_per_s}
        for tier in (Tier.VAULT, Tier.PEER):
            speed = self.remote.speed(tier) if self.remote is not None else None
            if speed is not None:
                found[tier] = speed.bytes_per_s
        return {tier.value: rate for tier, rate in found.items() if rate}

    def loads(self) -> dict[str, TierLoad]:
        loads = dict(self.remote.loads()) if self.remote is not None else {}
        if self.host.blocks:
            pool, size = self.host.pool, self.host.block_bytes
            loads[Tier.HOST.value] = TierLoad(
                blocks=pool.index.addressed,
                bytes_used=(pool.used + pool.cached) * size,
                bytes_total=pool.num_blocks * size,
                offloaded_blocks_total=self.offloader.offloaded_total,
                evictions_total=pool.evictions,
            )
        if self.snapshots is not None:
            loads[Tier.STATE.value] = self.snapshots.load()
        tokens, failures = self.restorer.tokens_total, self.restorer.failures_total
        per_token = self.memory.block_bytes / self.pool.block_size
        for tier in ([Tier.HOST] if self.host.blocks else []) + ([Tier.VAULT, Tier.PEER] if self.remote else []):
            known = loads.get(tier.value, TierLoad())
            loads[tier.value] = replace(
                known,
                hit_tokens_total=tokens[tier],
                restores_total=self.restorer.restores_total[tier],
                restored_bytes_total=int(tokens[tier] * per_token),
                restore_seconds_total=self.restorer.seconds_total[tier],
                failures_total=known.failures_total | {why: n for (of, why), n in failures.items() if of is tier},
            )
        return loads

    def lendable(self, asked: Iterable[bytes]) -> dict[bytes, Lendable]:
        return {} if self.snapshots is None else self.snapshots.lendable(asked)

    def readable(self) -> list[tuple[BlockPool, Callable[[int], memoryview]]]:
        return [(self.pool, self._read_device), (self.host.pool, self.host.view)]

    def _read_device(self, block: int) -> memoryview:
        view = self.memory.view(block)
        if view is None:
            view = memoryview(bytearray(self.memory.block_bytes))
            self.memory.read(block, view)
        return view

    def held(self) -> list[list[int]]:
        return self.restorer.held() + self.offloader.held() + self._lent_of(self.pool)

    def _held_on_host(self) -> list[list[int]]:
        return self.restorer.held_on_host() + self.offloader.held_on_host() + self._lent_of(self.host.pool)

    def _lent_of(self, pool: BlockPool) -> list[list[int]]:
        return [chain for held in self.lent.values() for of, chain in held if of is pool]

    def audit(self) -> None:
        self._audit.look(self._held_on_host())

    def check_integrity(self) -> None:
        check_integrity(self.host.pool, self._held_on_host())
        if self.snapshots is not None:
            self.snapshots.check_integrity()


@dataclass(frozen=True, slots=True)
class Verifier:
    """Computes restored blocks again, while the engine is idle, and compares. A checksum says that bytes are those that
    were stored, not that they were right; so the last block of a sampled chain is run through the model on the blocks
    before it."""

    runner: ModelRunner
    tiers: Tiers

    @property
    def has_work(self) -> bool:
        return bool(self.tiers.restorer.samples) and not self.tiers.waiting

    def check_one(self) -> None:
        """Takes a step of one block. A wrong block is discarded with all blocks that came with it."""
        sample, tiers = self.tiers.restorer.samples.popleft(), self.tiers
        difference = self._difference(sample)
        if difference is None or difference <= self.runner.tolerance:
            return
        source = sample.source or "this host"
        logger.error("a block restored from %s is wrong: its numbers differ by %.3g of the largest", source, difference)
        tiers.restorer.failures_total[sample.tier, "wrong"] += 1
        tiers.discard(sample.root, sample.hashes[: sample.start + 1])
        if tiers.remote is not None and sample.source:
            tiers.remote.distrust(sample.source)

    def _difference(self, sample: RestoreSample) -> float | None:
        """Relative to the largest number; None if the block was evicted meanwhile, or there is no room."""
        pool = self.tiers.pool
        at, size = len(sample.hashes) - 1, pool.block_size
        chain = pool.chain_to(sample.hashes)
        if len(chain) <= at or pool.index[chain[at]].lossy or pool.available <= pool.idle_among(chain):
            return None
        pool.acquire(chain)
        scratch = pool.allocate(1)
        try:
            self.runner.run([Slice(sample.ids, at * size, [*chain[:at], *scratch], None)])
            return self.runner.difference(scratch[0], chain[at])
        except OutOfMemory as error:
            logger.debug("a restored block was not checked: %s", error)
            return None
        finally:
            pool.release(scratch)
            pool.release(chain)
