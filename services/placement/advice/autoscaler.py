"""The autoscaling signals of every model: its load, and how many workers it should have. Pure.

Every replica hears the same heartbeats and the others' refusals, so all of them measure the same. A worker is busy for
the share of its heartbeats with prompt tokens to feed, whatever its rate. Tokens over rates tell how much more is due.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvfleet.placement.advice.autoscale import PARTS, LoadSample, Rules, Scaler, mean_rate
from kvfleet.placement.workers.fleet import Fleet, Worker
from kvfleet.placement.workers.heard_demand import spare_of
from kvproto.messages import ModelSignals, Refused, State

MAX_MODELS = 1024
OUTSIDE_S = 60.0  # that refused tokens count
STALE_S = 4.0  # since a heartbeat: then a worker's load is unknown
REFUSED_S = 10.0  # that a refused request counts as waiting outside


@dataclass(slots=True)
class _Refused:
    at: float
    requests: int
    tokens: int


@dataclass(eq=False, slots=True)
class Outside:
    """Refused requests of all replicas."""

    refused: deque[_Refused] = field(default_factory=deque)
    asked_at: float = float("-inf")
    first_at: float = float("-inf")  # since when there are refusals without a pause

    def refuse(self, requests: int, tokens: int, now: float) -> None:
        if now - self.asked_at > OUTSIDE_S:
            self.first_at = now
        self.asked_at = now
        if self.refused and now - self.refused[-1].at < 1.0:
            self.refused[-1].requests += requests
            self.refused[-1].tokens += tokens
        else:
            self.refused.append(_Refused(now, requests, tokens))
        while self.refused[0].at <= now - OUTSIDE_S:
            self.refused.popleft()

    def requests(self, now: float) -> int:
        """Requests that wait outside."""
        return sum(one.requests for one in self.refused if now - one.at <= REFUSED_S)

    def tokens_per_s(self, now: float) -> float:
        return sum(one.tokens for one in self.refused if now - one.at <= OUTSIDE_S) / OUTSIDE_S


@dataclass(slots=True)
class _Model:
    scaler: Scaler
    signals: ModelSignals
    outside: Outside = field(default_factory=Outside)
    sampled_at: float = float("-inf")


class Autoscaler:
    """Owned by the core. A placed request counts once a worker has it: mere placements start no workers.
    `by_ordinal`: as in a StatefulSet, the worker with the highest number is removed."""

    def __init__(self, fleet: Fleet, rules: Rules, models: Iterable[str], *, by_ordinal: bool) -> None:
        self.rules = rules
        self._fleet = fleet
        self._by_ordinal = by_ordinal
        self._models: dict[str, _Model] = {}
        for model in models:
            fleet.learn_name(model)
            self._know(model)

    def refuse(self, refused: Iterable[Refused], now: float) -> None:
        """Count refusals of models that this fleet knows: invented names are no demand. Adapters' are their model's."""
        for one in refused:
            if self._fleet.is_known(one.model):
                self._know(self._fleet.base_of(one.model)).outside.refuse(one.requests, one.tokens, now)

    def tick(self, now: float) -> None:
        """Take the samples that are due."""
        for worker in self._fleet.workers.values():
            self._know(worker.model)
        due = [name for name, one in self._models.items() if now - one.sampled_at >= self.rules.period_s - 1e-6]
        if not due:
            return
        of_model: dict[str, list[Worker]] = {name: [] for name in due}
        for worker in self._fleet.workers.values():
            of_model.get(worker.model, []).append(worker)
        for name in due:
            self._sample(name, self._models[name], of_model[name], now)

    def signals(self) -> list[ModelSignals]:
        known = dict(self._models)  # a scrape reads this from a thread of its own
        return [known[name].signals for name in sorted(known)]

    def _know(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is None:
            if len(self._models) >= MAX_MODELS:
                living = {worker.model for worker in self._fleet.workers.values()}
                gone = next((name for name in self._models if name not in living), next(iter(self._models)))
                del self._models[gone]
            scaler = Scaler(self.rules)
            minimum, maximum = self.rules.minimum, self.rules.maximum
            signals = ModelSignals(model, desired=scaler.desired, minimum=minimum, maximum=maximum, known=False)
            known = self._models[model] = _Model(scaler, signals)
        return known

    def _sample(self, name: str, model: _Model, workers: list[Worker], now: float) -> None:
        model.sampled_at = now
        ready = [worker for worker in workers if worker.state is State.READY]
        living = len(ready) + sum(worker.state is State.STARTING for worker in workers)
        heard = [worker for worker in ready if now - worker.demand.heard_at <= STALE_S]
        for one in heard:
            one.demand.sample(one.load, now, self.rules.recent_s)
        known = len(heard) == len(ready)
        sample = self._measure(heard, len(ready), living, model.outside, now, known=known)
        model.scaler.observe(sample, now)
        waits = [one.load.oldest_wait_s + now - one.demand.heard_at for one in heard if one.load.waiting]
        in_vain = not ready and now - model.outside.asked_at <= REFUSED_S
        outside_s = now - model.outside.first_at if in_vain else 0.0
        highest = _highest(workers)
        model.signals = replace(
            model.signals,
            queue_depth=sum(one.load.waiting for one in heard) + model.outside.requests(now),
            oldest_wait_s=max([*waits, outside_s]),
            saturation=sample.saturation,
            desired=model.scaler.desired,
            ready=len(ready),
            living=living,
            known=known,
            settled_s=model.scaler.settled_s,
            parts={part: getattr(sample, part) for part in PARTS},
            next_ordinal=highest or "",
        )
        self._fleet.next_to_go.pop(name, None)
        if self._by_ordinal and highest is not None and model.scaler.desired < living:
            self._fleet.next_to_go[name] = highest

    def _measure(
        self, heard: list[Worker], ready: int, living: int, outside: Outside, now: float, *, known: bool
    ) -> LoadSample:
        every = sum(one.load.waiting + one.load.running for one in heard)
        spare = {one.id: spare_of(one.load).requests for one in heard}
        requests = max(every - sum(spare.values()), 0)  # spare work keeps a worker, and wants no further one
        asked = bool(every) or now - outside.asked_at <= OUTSIDE_S or any(one.demand.tokens_per_s for one in heard)
        if not heard:
            return LoadSample(ready, living, asked=asked, known=known)
        rate = mean_rate(one.rates for one in heard)
        due = sum(one.demand.tokens_per_s for one in heard if not spare[one.id]) + outside.tokens_per_s(now)
        queued = {one.id: one.load.queued_prefill_tokens - spare_of(one.load).queued_prefill_tokens for one in heard}
        fed = [(queued[one.id], one.rates.prefill_tokens_per_s) for one in heard]
        waits = sorted(queued / speed if speed > 0 else 0.0 for queued, speed in fed)
        usual_wait_s = waits[(len(waits) - 1) // 2]  # half have a shorter queue: a new request goes to one of them
        slots = sum(one.load.slots for one in heard)
        blocks = sum(one.load.blocks_total for one in heard)
        others = requests / every if every else 1.0
        return LoadSample(
            ready,
            living,
            work=max(due / rate if rate else 0.0, sum(one.demand.busy_share for one in heard)),
            queue=len(heard) * usual_wait_s / self.rules.target_ttft_s,
            slots=len(heard) * (requests + outside.requests(now)) / slots if slots else 0.0,
            blocks=len(heard) * sum(one.load.blocks_used for one in heard) / blocks * others if blocks else 0.0,
            asked=asked,
            known=known,
        )


def _highest(workers: Iterable[Worker]) -> str | None:
    """The worker whose name ends in the highest number, of those that stay: `kvfleet-worker-11`."""
    ordinals = [
        (int(found[0]), worker.id)
        for worker in workers
        if worker.state in (State.READY, State.STARTING) and (found := re.search(r"[0-9]+$", worker.id))
    ]
    return max(ordinals, default=(0, None))[1]
