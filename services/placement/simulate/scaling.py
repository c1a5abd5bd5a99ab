"""Workers that come and go as placement desires, in virtual time, and what a scale-down costs. Pure.

The numbers are the autoscaler's own: the simulated cores hear heartbeats as real ones do. A new worker takes `start_s`
to be ready; surplus workers drain, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvfleet.placement.advice.questions import survey
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.simulate.fleet_shape import Autoscale, Victim
from kvfleet.placement.simulate.sim_cache import LruCache

NOTE_S = 10.0


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float
    ready: int
    starting: int
    desired: int


@dataclass(slots=True)
class Scaling:
    scale: Autoscale
    block_tokens: int
    model: str
    starting: int = 0
    lost: set[int] = field(default_factory=set)  # blocks, until they are computed again
    timeline: list[Moment] = field(default_factory=list)
    ups: int = 0
    downs: list[float] = field(default_factory=list)  # when each worker went
    lost_blocks: int = 0  # that no other worker had
    lost_tokens: int = 0  # computed again because a scale-down took the only copy

    def look(
        self, staying: Collection[str], living: Collection[str], cores: Sequence[PlacementCore], now: float
    ) -> tuple[int, str | None]:
        """How many workers to start, and who goes: none while another one is on the way out, or in. As an autoscaler
        does it follows the replica that desires most."""
        desired = max(one.desired for core in cores for one in core.autoscaler.signals())
        timeline, moment = self.timeline, Moment(now, len(staying), self.starting, desired)
        last = timeline[-1] if timeline else None
        if last is None or now - last.at_s >= NOTE_S or last != replace(moment, at_s=last.at_s):
            timeline.append(moment)
        more = max(desired - len(staying) - self.starting, 0)
        self.starting += more
        self.ups += more
        is_one_too_many = len(staying) > desired and len(staying) == len(living) and not self.starting
        return more, self._victim(staying, cores[0], now) if is_one_too_many else None

    def _victim(self, staying: Collection[str], core: PlacementCore, now: float) -> str:
        if self.scale.victim is Victim.CHEAPEST:
            *_, costs = survey(self.model, core.decider.heat, core.fleet, core.indexer, now)
            found = [one.worker for one in costs if one.worker in staying]
            if found:
                return found[0]
        return max(staying, key=lambda name: int(name[1:]))

    def lose(self, cache: LruCache, others: Sequence[LruCache], now: float) -> None:
        alone = {block for block in cache if not any(block in other for other in others)}
        self.lost |= alone
        self.lost_blocks += len(alone)
        self.downs.append(now)

    def computes(self, blocks: Iterable[int]) -> None:
        """Each lost block counts once."""
        again = self.lost.intersection(blocks)
        self.lost -= again
        self.lost_tokens += len(again) * self.block_tokens
