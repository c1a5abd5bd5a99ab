"""Workers that come and go as placement desires, in virtual time, and what their going costs. Pure.

The numbers are the autoscaler's own: the simulated cores hear heartbeats as real ones do. A worker that is wanted takes
`start_s` to be ready; one that is not drains, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.simulate.attainable import LruCache

SCALE_S = 1.0  # between looks
NOTE_S = 10.0


class Victim(StrEnum):
    """Who goes."""

    CHEAPEST = "cheapest"  # to lose, as placement says
    ORDINAL = "ordinal"  # the highest number, as a StatefulSet does


@dataclass(frozen=True, slots=True)
class Autoscale:
    rules: Rules
    start_s: float = 60.0
    victim: Victim = Victim.CHEAPEST


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float
    ready: int
    starting: int
    desired: int


@dataclass(slots=True)
class Scaled:
    """What happened. `lost_tokens` were computed again because a scale-down took the only copy."""

    timeline: list[Moment] = field(default_factory=list)
    ups: int = 0
    downs: list[float] = field(default_factory=list)  # when each worker went
    lost_blocks: int = 0  # that nobody else had
    lost_tokens: int = 0


class Scaling:
    """Of one run; owned by the simulation."""

    def __init__(self, scale: Autoscale, scaled: Scaled, block_tokens: int, model: str) -> None:
        self.start_s = scale.start_s
        self._victim = scale.victim
        self._scaled = scaled
        self._block_tokens = block_tokens
        self._model = model
        self._starting = 0
        self._lost: set[int] = set()

    def note(self, now: float, ready: int, desired: int) -> None:
        timeline = self._scaled.timeline
        moment = Moment(now, ready, self._starting, desired)
        if not timeline or now - timeline[-1].at_s >= NOTE_S or timeline[-1] != Moment(
            timeline[-1].at_s, ready, self._starting, desired
        ):  # fmt: skip
            timeline.append(moment)

    def to_start(self, ready: int, desired: int) -> int:
        more = max(desired - ready - self._starting, 0)
        self._starting += more
        self._scaled.ups += more
        return more

    def came(self) -> None:
        self._starting -= 1

    def is_one_too_many(self, staying: Collection[str], living: Collection[str], desired: int) -> bool:
        """And nobody is on the way out, or in."""
        return len(staying) > desired and len(staying) == len(living) and not self._starting

    def victim(self, staying: Collection[str], core: PlacementCore, now: float) -> str:
        if self._victim is Victim.CHEAPEST:
            survey = core.survey(self._model, now)
            while not survey.step():
                pass
            found = [one.worker for one in survey.costs() if one.worker in staying]
            if found:
                return found[0]
        return max(staying, key=lambda name: int(name[1:]))

    def lose(self, cache: LruCache, others: Sequence[LruCache], now: float) -> None:
        """A worker went, with these blocks."""
        alone = {block for block in cache if not any(block in other for other in others)}
        self._lost |= alone
        self._scaled.lost_blocks += len(alone)
        self._scaled.downs.append(now)

    def computes(self, blocks: Iterable[int]) -> None:
        """Somebody has to compute these: each block that was lost counts once."""
        again = self._lost.intersection(blocks)
        self._lost -= again
        self._scaled.lost_tokens += len(again) * self._block_tokens


def worker_hours(lives: Iterable[tuple[float, float]], ended_s: float, start_s: float) -> float:
    """That are paid for: a worker that came later costs from when it was asked for."""
    hours = 0.0
    for came, went in lives:
        hours += min(went, ended_s) - max(came - start_s, 0.0) if came < ended_s else 0.0
    return hours / 3600
