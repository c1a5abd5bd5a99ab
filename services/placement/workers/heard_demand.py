"""The work that a worker's heartbeats tell of, and what of it waits for what is left over. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvproto.messages import SPARE_PRIORITY, Load, PriorityLoad

HITS_S = 60.0  # window of the hit rate
HITS_SAMPLE_S = 5.0  # between totals kept for it


@dataclass(frozen=True, slots=True)
class _Totals:
    at: float
    beats: int
    busy: int
    prefilled: int
    queued: int


@dataclass(slots=True)
class HeardDemand:
    """The work in one life's heartbeats."""

    heard_at: float = float("-inf")
    beats: int = 0
    busy: int = 0
    totals: deque[_Totals] = field(default_factory=deque)  # one per sample, the first about a window ago
    hits: deque[tuple[float, int, int]] = field(default_factory=deque)  # when, prompt and hit tokens; of a minute

    def hear(self, load: Load, now: float) -> None:
        self.heard_at = now
        self.beats += 1
        self.busy += load.queued_prefill_tokens > spare_of(load).queued_prefill_tokens
        if not self.hits or now - self.hits[-1][0] >= HITS_SAMPLE_S:
            self.hits.append((now, load.prompt_tokens_total, load.hit_tokens_total))
        while len(self.hits) > 1 and now - self.hits[1][0] >= HITS_S:
            self.hits.popleft()

    def sample(self, load: Load, now: float, window_s: float) -> None:
        prefilled = max(load.fed_tokens_total - load.generated_tokens_total, 0)
        self.totals.append(_Totals(now, self.beats, self.busy, prefilled, load.queued_prefill_tokens))
        while len(self.totals) > 2 and self.totals[1].at <= now - window_s:
            self.totals.popleft()

    @property
    def busy_share(self) -> float:
        first, last = self.totals[0], self.totals[-1]
        beats = last.beats - first.beats
        return (last.busy - first.busy) / beats if beats else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens fed, and those that came to wait."""
        first, last = self.totals[0], self.totals[-1]
        if last.at <= first.at:
            return 0.0
        return max(last.prefilled - first.prefilled + last.queued - first.queued, 0) / (last.at - first.at)


def spare_of(load: Load) -> PriorityLoad:
    """The part of it that waits for what is left over."""
    return next((one for one in load.priorities if one.priority == SPARE_PRIORITY), PriorityLoad(SPARE_PRIORITY))
