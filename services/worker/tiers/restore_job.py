"""A restore under way: where its blocks go, and the parts that bring them. The restorer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers.break_even import RestoredPart
from kvfleet.worker.tiers.host import CopyJob, Landing
from kvproto.block_hash import Root
from kvproto.messages import Tier


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
    on_end: Callable[[int, float], None] | None = None  # gets the blocks that came without a gap, and the seconds
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
