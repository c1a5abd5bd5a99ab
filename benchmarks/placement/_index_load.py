"""What a prefix index of a fleet holds and hears: 64 workers, a million blocks, the same for every reader of a seed.

Owns the load and what the right answers are; knows no index. Standard library only: it is imported by the interpreter
of the peer, which makes the same load from the same seed.

    load = Load(seed=1)
    for event in load.fill():  ...    # until a million different blocks are held
    for event in load.steady(n): ...  # 16 blocks stored and 16 removed in each
    for prompt in load.prompts(128, distinct=8, count=500): ...

| chains | blocks | held by |
| --- | --- | --- |
| of prompts | 128 and 1,904 | all 64 workers, to 8 or to 64 distinct depths; what follows the deepest is new |
| others | 16 to 2,048, as many of each power of two | one or several workers, to any depth |

Every fifth prompt is a chain that nobody holds. Workers evict leaves first, the chain that they have had longest before
others; the chains of prompts stay. With three tiers a worker's share of a prompt's chain lies on its device and then on
its host, and four vaults have the chain's first half or more, in runs of 64, of every other chain all but one run. The
fleet holds more than a million different blocks, and ever more of them while it runs, as fewer are
shared: an index that is bounded to a million is full, and evicts too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

WORKERS = 64
BLOCKS = 1_000_000
RUN = 16  # blocks of an event: stored, and as many removed
LENGTHS = (128, 1_904)
DISTINCT = (8, 64)
MISSES = 5  # every fifth prompt
CHAINS = {128: 100, 1_904: 16}  # of prompts, for each number of distinct depths
HEARD_BETWEEN = 4  # events between two look-ups
SHARED_BEFORE, SHARED = 1 / 2, 1 / 4  # of the other chains that a worker begins, those that another one has begun
ON_DEVICE = 0.7  # of a share, if the rest lies on the host
VAULTS, VAULT_RUN = 4, 64


@dataclass(slots=True, eq=False)
class Chain:
    hashes: list[bytes]
    longest: int = 0  # that any worker ever had


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks that a worker evicted, last of the chain first, and then stored behind `parent`, all in one tier. Vaults
    have numbers after the workers'."""

    worker: int
    removed: list[bytes]
    parent: bytes
    stored: list[bytes]
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """`depths` are those of each worker, on device and host; 0: has nothing of it. `vaulted` are blocks in vaults."""

    hashes: list[bytes]
    depths: tuple[int, ...] = (0,) * WORKERS
    vaulted: frozenset[int] = frozenset()

    @property
    def reaches(self) -> tuple[int, ...]:
        """Of each worker, with what vaults have from where its own ends."""
        ends = {depth: next(at for at in count(depth) if at not in self.vaulted) for depth in set(self.depths)}
        return tuple(ends[depth] for depth in self.depths)

    @property
    def is_hit(self) -> bool:
        return any(self.depths)


@dataclass(slots=True)
class _Worker:
    """What it holds of other chains, oldest first: chain and depth."""

    resident: deque[tuple[Chain, int]] = field(default_factory=deque)
    growing: Chain | None = None
    depth: int = 0


class Load:
    def __init__(self, seed: int = 1, *, tiers: int = 1, blocks: int = BLOCKS, excess: float = 0.05) -> None:
        """`excess`: how many more blocks the fleet holds than `blocks`."""
        self._chance = Random(seed)
        self._tiers = tiers
        self._blocks = round(blocks * (1 + excess))
        self._workers = [_Worker() for _ in range(WORKERS)]
        self._recent: deque[Chain] = deque(maxlen=WORKERS)
        self._next = 0
        self._shared = SHARED_BEFORE
        self._wide = {
            (length, distinct): [self._wide_chain(length, distinct) for _ in range(CHAINS[length])]
            for length in LENGTHS
            for distinct in DISTINCT
        }

    # ------------------------------------------------------------------ events

    def fill(self) -> Iterator[Event]:
        """What makes an empty index full."""
        for several in self._wide.values():
            for prompt in several:
                for worker, depth in enumerate(prompt.depths):
                    yield from self._held(worker, prompt.hashes, depth)
                for first in sorted({at - at % VAULT_RUN for at in prompt.vaulted}):
                    run = [prompt.hashes[at] for at in range(first, first + VAULT_RUN) if at in prompt.vaulted]
                    yield Event(WORKERS + run[0][0] % VAULTS, [], b"", run, 2)
        wide = [prompt for several in self._wide.values() for prompt in several]
        held = sum(len(prompt.vaulted.union(range(max(prompt.depths)))) for prompt in wide)
        while held < self._blocks:
            worker = self._turn()
            chain, depth = self._grow(self._workers[worker])
            held += max(0, depth + RUN - chain.longest)
            chain.longest = max(chain.longest, depth + RUN)
            yield self._event(worker, [], chain, depth)
        self._shared = SHARED

    def steady(self, count: int) -> Iterator[Event]:
        """After `fill`: every worker in turn stores blocks and evicts as many."""
        for _ in range(count):
            worker = self._turn()
            mine = self._workers[worker]
            chain, depth = self._grow(mine)
            oldest, length = mine.resident.popleft()
            if length > RUN:
                mine.resident.appendleft((oldest, length - RUN))
            yield self._event(worker, oldest.hashes[length - RUN : length][::-1], chain, depth)

    def newest(self, worker: int) -> tuple[list[bytes], int]:
        """A chain that the worker has, and how much of it."""
        chain, depth = self._workers[worker].resident[-1]
        return chain.hashes, depth

    # ------------------------------------------------------------------ look-ups

    def prompts(self, length: int, distinct: int, count: int) -> Iterator[Prompt]:
        """One after the other, each chain as often as every other."""
        hits = self._wide[length, distinct]
        for number in range(count):
            if number % MISSES == MISSES - 1:
                yield Prompt(self._new(length))
            else:
                yield hits[(number - number // MISSES) % len(hits)]

    # ------------------------------------------------------------------ inside

    def _new(self, length: int) -> list[bytes]:
        raw = self._chance.randbytes(16 * length)
        return [raw[at : at + 16] for at in range(0, len(raw), 16)]

    def _wide_chain(self, length: int, distinct: int) -> Prompt:
        depths = self._chance.sample(range(1, length), distinct)
        several = [depths[worker % distinct] for worker in range(WORKERS)]
        self._chance.shuffle(several)
        return Prompt(self._new(length), tuple(several), self._vaulted(length) if self._tiers > 1 else frozenset())

    def _vaulted(self, length: int) -> frozenset[int]:
        end = self._chance.randrange(length // 2, length)
        lost = self._chance.randrange(0, 2 * end, VAULT_RUN)
        return frozenset(range(end)) - frozenset(range(lost, lost + VAULT_RUN))

    def _held(self, worker: int, hashes: list[bytes], depth: int) -> Iterator[Event]:
        start = 0
        for tier, end in enumerate([depth] if self._tiers == 1 else [round(depth * ON_DEVICE), depth]):
            for at in range(start, end, RUN):
                yield Event(worker, [], hashes[at - 1] if at else b"", hashes[at : min(at + RUN, end)], tier)
            start = end

    def _turn(self) -> int:
        self._next = (self._next + 1) % WORKERS
        return self._next

    def _grow(self, mine: _Worker) -> tuple[Chain, int]:
        """The chain, and the depth, from which the worker stores its next blocks."""
        if mine.growing is not None and mine.depth == len(mine.growing.hashes):
            mine.resident.append((mine.growing, mine.depth))
            mine.growing = None
        if mine.growing is None:
            mine.growing, mine.depth = self._begin(mine), 0
        mine.depth += RUN
        return mine.growing, mine.depth - RUN

    def _begin(self, mine: _Worker) -> Chain:
        if self._recent and self._chance.random() < self._shared:
            shared = self._chance.choice(self._recent)
            if all(chain is not shared for chain, _ in mine.resident):
                return shared
        made = Chain(self._new(RUN * max(1, round(2 ** self._chance.uniform(4, 11)) // RUN)))
        self._recent.append(made)
        return made

    def _event(self, worker: int, removed: list[bytes], chain: Chain, depth: int) -> Event:
        parent = chain.hashes[depth - 1] if depth else b""
        return Event(worker, removed, parent, chain.hashes[depth : depth + RUN])


def p50(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) / 2) - 1]
