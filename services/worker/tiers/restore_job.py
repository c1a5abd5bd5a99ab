"""One restore: which blocks of a chain are on their way, in which parts, and who waits for them. Plain state, owned by
the restorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers.break_even import RestoredPart
from kvfleet.worker.tiers.host import CopyJob
from kvfleet.worker.tiers.landing import Landing
from kvproto.block_hash import Root
from kvproto.messages import Tier


class Arrived(NamedTuple):
    lossy: bool
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestoreSample:
    """A restored chain of which the last block is to be computed again and compared. Blocks from `start` on came from
    `source`: a vault's or peer's id, "" the host."""

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
    def staged(self) -> bool:
        """Whether it lands on the host first."""
        return self.landing is not None and bool(self.slots)

    @property
    def arrived(self) -> int:
        """Blocks so far, gaps or not; of those staged on the host, once that copy has begun, those it has made."""
        if self.copy is not None:
            return self.copy.done
        return 0 if self.landing is None else sum(header is not None for header in self.landing.headers)

    @property
    def ended(self) -> bool:
        if self.copy is not None:
            return self.copy.ended
        return self.landing is not None and self.landing.ended and not self.staged


@dataclass(slots=True)
class RestoreJob:
    """Blocks `start` to `end` of a chain, on their way."""

    root: Root
    hashes: Sequence[bytes]
    ids: list[tuple[int, ...]]  # of each block; empty where it is not known
    start: int
    end: int
    exact: bool
    held: Sequence[int]  # the chain before them, on the device
    began: float
    deadline: float
    compute_s: float  # what computing them would take
    blocks: list[int] = field(default_factory=list)  # where they go
    running: list[RunningPart] = field(default_factory=list)
    waiting: list[EngineSequence] = field(default_factory=list)
    ahead: bool = False  # nobody waits: it is brought for those to come

    def came_short(self, tier: Tier, depth: int) -> None:
        """More than `depth` blocks were found there, and are not to be had: that is not tried again."""
        for sequence in self.waiting:
            if (location := sequence.spec.location) is None:
                continue
            if tier is Tier.VAULT:
                location.finding.vault = min(location.finding.vault, depth)
            elif tier is Tier.PEER:
                location.finding.peer = min(location.finding.peer, depth)

    def sample(self, count: int) -> RestoreSample:
        """The chain to the last of the `count` blocks that came."""
        at = self.start + count - 1
        last = next(running for running in self.running if running.part.start <= at < running.part.end)
        source = last.landing.sources.get(at - last.part.start, "") if last.landing is not None else ""
        hashes = list(self.hashes[: at + 1])
        return RestoreSample(self.root, hashes, self.ids[count - 1], last.part.start, last.part.tier, source)
