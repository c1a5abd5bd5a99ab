"""How many workers a model should have, from samples of its load. Pure.

    need         workers that would just be busy, the largest of
                   work    prompt tokens due per second over what one worker feeds; and how many were feeding any
                   queue   for the wait that a new request would meet to be the TTFT target
                   slots   requests over the slots of a worker
                   blocks  KV blocks that running sequences hold over those of a worker
    saturation   need / ready workers

    up    each third of the last `up_s` was above `up_above` (in the mean; a sample counts 1 at most)
            ──▶ need / aim workers, one more at least, twice as many at most
    down  the last `down_s` were below `down_below` (in the mean), and so was the end of it
            ──▶ one fewer, if the rest has room
    none  a model without workers gets one with its first request; one with a minimum of 0 loses its last after
          `down_s` without requests

Missing data lowers nothing. The desired number begins as what is there, follows added workers, and does not follow
deaths. Each change, and each gap in the samples, begins a new history, and both rules want a whole one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvproto.messages import Rates

GAP_PERIODS = 3.5  # between samples: more is a gap
LEAST_GAP_S = 2.0
THIRDS = 3  # of `up_s`: noise passes through a mean, a burst not through three
PARTS = ("work", "queue", "slots", "blocks")  # of a need


@dataclass(frozen=True, slots=True)
class Rules:
    """For all models. `aim`, the saturation after a change, is between the limits: neither rule undoes the other's."""

    target_ttft_s: float = 2.0
    minimum: int = 1
    maximum: int = 16
    up_above: float = 0.8
    up_s: float = 180.0
    down_below: float = 0.3
    down_s: float = 600.0
    aim: float = 0.6

    @property
    def period_s(self) -> float:
        """Between samples."""
        return min(5.0, self.up_s / 18, self.down_s / 18)

    @property
    def recent_s(self) -> float:
        return self.up_s / THIRDS

    def clamp(self, replicas: int) -> int:
        return min(max(replicas, self.minimum), self.maximum)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A model at one moment; the parts of its need are in workers."""

    ready: int
    living: int  # with starting ones
    work: float = 0.0
    queue: float = 0.0
    slots: float = 0.0
    blocks: float = 0.0
    asked: bool = False
    known: bool = True  # every ready worker was heard a moment ago
    at: float = 0.0

    @property
    def need(self) -> float:
        return max(self.work, self.queue, self.slots, self.blocks)

    @property
    def saturation(self) -> float:
        return self.need / self.ready if self.ready else float(self.asked)

    @property
    def filled(self) -> float:
        return min(self.saturation, 1.0)


def mean_rate(several: Iterable[Rates]) -> float:
    """Prefill tokens/s of a worker, in the harmonic mean of measured ones; 0 if there are none."""
    rates = [one.prefill_tokens_per_s for one in several if one.prefill_tokens_per_s > 0]
    return len(rates) / sum(1 / rate for rate in rates) if rates else 0.0


def grown(need: float, ready: int, rules: Rules) -> int:
    """Workers needed at `aim`, at least one more, at most twice as many."""
    return min(max(math.ceil(need / rules.aim - 1e-9), ready + 1), 2 * ready)


def shrinks(need: float, target: int, rules: Rules) -> bool:
    """Whether one fewer would stay below `aim`; never the last one."""
    return target > 1 and need <= rules.aim * (target - 1)


@dataclass(eq=False, slots=True)
class Scaler:
    """Of one model. Owned by the Autoscaler; `now` never goes back."""

    rules: Rules
    target: int | None = None  # None: unknown yet
    living: int = 0
    history: deque[LoadSample] = field(default_factory=deque)  # since the last change or gap, of the last `down_s`
    began: float = 0.0

    @property
    def desired(self) -> int:
        return self.rules.clamp(self.target or 0)

    @property
    def settled_s(self) -> float:
        """Since the last change or gap."""
        return self.history[-1].at - self.began if self.history else 0.0

    def observe(self, sample: LoadSample, now: float) -> None:
        """Call it about every `period_s`."""
        rules, history = self.rules, self.history
        # An operator who adds workers has a reason; missing ones say nothing about the load.
        if self.target is None or sample.living > self.living:
            self.target = rules.clamp(max(self.target or 0, sample.living))
        self.living = sample.living
        is_gap = bool(history) and now - history[-1].at > max(GAP_PERIODS * rules.period_s, LEAST_GAP_S)
        if not sample.known or not sample.ready or is_gap:
            history.clear()
        if not sample.known:
            return
        if not sample.ready:
            if sample.asked and not self.target:
                self.target = rules.clamp(1)
            return
        if not history:
            self.began = now
        history.append(replace(sample, at=now))
        while history[0].at < now - max(rules.down_s, rules.up_s) - rules.period_s / 2:
            history.popleft()
        self._decide(self.target, sample.ready)

    def _decide(self, before: int, ready: int) -> None:
        rules, target = self.rules, before
        recent = self._since(rules.recent_s)
        now_is = _mean(one.filled for one in recent)
        need = _mean(one.need for one in recent)
        if self._covers(rules.up_s) and self._is_high():
            target = max(before, rules.clamp(grown(need, ready, rules)))
        elif self._covers(rules.down_s) and now_is < rules.down_below:
            past = self._since(rules.down_s)
            low = _mean(one.filled for one in past) < rules.down_below
            enough = shrinks(max(need, _mean(one.need for one in past)), before, rules)
            unasked = before == 1 and not any(one.asked for one in past)
            if low and (enough or unasked):
                target = rules.clamp(before - 1)
        if target != before:
            self.target = target
            self.history.clear()

    def _is_high(self) -> bool:
        each_s, newest = self.rules.recent_s, self.history[-1].at
        thirds: list[list[float]] = [[] for _ in range(THIRDS)]
        for one in self._since(self.rules.up_s):
            thirds[min(int((newest - one.at) / each_s), THIRDS - 1)].append(one.filled)
        return all(_mean(third) > self.rules.up_above for third in thirds)

    def _covers(self, seconds: float) -> bool:
        return self.settled_s >= seconds - self.rules.period_s / 2

    def _since(self, seconds: float) -> list[LoadSample]:
        """The newest first."""
        since = self.history[-1].at - seconds - self.rules.period_s / 2
        return list(takewhile(lambda one: one.at > since, reversed(self.history)))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
