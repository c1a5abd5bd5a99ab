"""The autoscaling signals of every model: what there is to do, and how many workers it should have. Pure.

A model has its series from the moment it is configured or first seen. `now` is the caller's monotonic seconds. Every
replica hears the same heartbeats and is told of the others' refusals, so all of them measure the same.

A worker counts as busy while it has any prompt token to feed: the share of its heartbeats that say so is how busy it
is, whatever its rate is said to be. Tokens over rates say by how much more than busy.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvfleet.placement.advice.autoscale import PARTS, LoadSample, Rules, Scaler, mean_rate
from kvfleet.placement.workers.fleet import Fleet, Worker
from kvproto.messages import ModelSignals, Refused, State

MAX_MODELS = 1024
OUTSIDE_S = 60.0  # what was refused counts for so long
STALE_S = 4.0  # since a heartbeat: more, and nothing is known of that worker
REFUSED_S = 10.0  # who was refused so lately is taken to stand outside


@dataclass(slots=True)
class _Refused:
    at: float
    requests: int
    tokens: int


@dataclass(eq=False, slots=True)
class Outside:
    """Requests that were refused, as all replicas tell."""

    refused: deque[_Refused] = field(default_factory=deque)
    asked_at: float = float("-inf")
    first_at: float = float("-inf")  # since when somebody asks again and again in vain

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
        """That stand outside."""
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
    """Owned by the core. What is placed counts once a worker says that it has it: asking for placements starts nobody.
    `by_ordinal`: as of a StatefulSet, the worker with the highest number is removed."""

    def __init__(self, fleet: Fleet, rules: Rules, models: Iterable[str], *, by_ordinal: bool) -> None:
        self.rules = rules
        self._fleet = fleet
        self._by_ordinal = by_ordinal
        self._models: dict[str, _Model] = {}
        for model in models:
            fleet.learn_name(model)
            self._know(model)

    def refuse(self, refused: Iterable[Refused], now: float) -> None:
        """Of models that this fleet knows: names that requests invent are no demand."""
        for one in refused:
            if self._fleet.is_known(one.model):
                self._know(one.model).outside.refuse(one.requests, one.tokens, now)

    def tick(self, now: float) -> None:
        """As often as one likes: a sample is taken when it is time."""
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
        """By model; as of the last sample."""
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
            signals = ModelSignals(
                model,
                desired=scaler.desired,
                minimum=self.rules.minimum,
                maximum=self.rules.maximum,
                known=False,  # until there is a sample: the desired number is no more than the minimum so far
            )
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
        model.signals = ModelSignals(
            name,
            queue_depth=sum(one.load.waiting for one in heard) + model.outside.requests(now),
            oldest_wait_s=max([*waits, outside_s]),
            saturation=sample.saturation,
            desired=model.scaler.desired,
            ready=len(ready),
            living=living,
            minimum=self.rules.minimum,
            maximum=self.rules.maximum,
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
        requests = sum(one.load.waiting + one.load.running for one in heard)
        asked = bool(requests) or now - outside.asked_at <= OUTSIDE_S or any(one.demand.tokens_per_s for one in heard)
        if not heard:
            return LoadSample(ready, living, asked=asked, known=known)
        rate = mean_rate(one.rates for one in heard)
        due = sum(one.demand.tokens_per_s for one in heard) + outside.tokens_per_s(now)
        fed = [(one.load.queued_prefill_tokens, one.rates.prefill_tokens_per_s) for one in heard]
        waits = sorted(queued / speed if speed > 0 else 0.0 for queued, speed in fed)
        usual_wait_s = waits[(len(waits) - 1) // 2]  # half have a queue of that or less: a new request goes to one
        slots = sum(one.load.slots for one in heard)
        blocks = sum(one.load.blocks_total for one in heard)
        return LoadSample(
            ready,
            living,
            work=max(due / rate if rate else 0.0, sum(one.demand.busy_share for one in heard)),
            queue=len(heard) * usual_wait_s / self.rules.target_ttft_s,
            slots=len(heard) * (requests + outside.requests(now)) / slots if slots else 0.0,
            blocks=len(heard) * sum(one.load.blocks_used for one in heard) / blocks if blocks else 0.0,
            asked=asked,
            known=known,
        )


def _highest(workers: Iterable[Worker]) -> str | None:
    """The worker whose name ends in the highest number, of those that are not going: `kvfleet-worker-11`."""
    ordinals = [
        (int(found[0]), worker.id)
        for worker in workers
        if worker.state in (State.READY, State.STARTING) and (found := re.search(r"[0-9]+$", worker.id))
    ]
    return max(ordinals, default=(0, None))[1]
