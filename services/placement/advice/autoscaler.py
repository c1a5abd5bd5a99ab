"""The autoscaling signals of every model: what there is to do, and how many workers it should have. Pure.

A model has its series from the moment it is configured or first seen, also while it has no worker. `now` is the
caller's monotonic seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvfleet.placement.advice.autoscale import LoadSample, Rules, Scaler
from kvfleet.placement.advice.autoscale_demand import STALE_S, HeardDemand, Outside, mean_rate, usual_wait_s
from kvfleet.placement.workers.fleet import Fleet, Worker
from kvproto.messages import Heartbeat, ModelSignals, Refused, State

MAX_MODELS = 1024


@dataclass(slots=True)
class _Model:
    scaler: Scaler
    outside: Outside
    signals: ModelSignals
    sampled_at: float = float("-inf")


class Autoscaler:
    """Owned by the core, which tells it what comes. What is placed counts once a worker says that it has it: one who
    only asks for placements makes nobody start workers. `by_ordinal`: the orchestrator removes the worker with the
    highest number, as a StatefulSet does."""

    def __init__(
        self,
        fleet: Fleet,
        rules: Rules | None = None,
        models: Iterable[str] = (),
        *,
        by_ordinal: bool = False,
    ) -> None:
        self.rules = rules or Rules()
        self._fleet = fleet
        self._by_ordinal = by_ordinal
        self._heard: dict[str, HeardDemand] = {}
        self._models: dict[str, _Model] = {}
        self._leaving: dict[str, str] = {}  # model -> who goes next, while one is to go
        for model in models:
            fleet.learn_name(model)
            self._know(model)

    # ------------------------------------------------------------------ what comes

    def hear(self, beat: Heartbeat, now: float) -> None:
        """Of a living worker's present life."""
        known = self._heard.get(beat.worker)
        if known is None or known.epoch != beat.epoch:
            known = self._heard[beat.worker] = HeardDemand(beat.epoch, now, beat.load, beat.rates)
        known.hear(beat, now)

    def leave(self, worker: str) -> None:
        self._heard.pop(worker, None)

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

    # ------------------------------------------------------------------ what is known

    def signals(self) -> list[ModelSignals]:
        """By model; as of the last sample."""
        known = dict(self._models)  # a scrape reads this from a thread of its own
        return [known[name].signals for name in sorted(known)]

    def leaving(self, model: str) -> str | None:
        """Who is about to be removed, and should get nothing new: known only where the highest ordinal goes."""
        return self._leaving.get(model)

    # ------------------------------------------------------------------ inside

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
            known = self._models[model] = _Model(scaler, Outside(), signals)
        return known

    def _sample(self, name: str, model: _Model, workers: list[Worker], now: float) -> None:
        model.sampled_at = now
        ready = [worker for worker in workers if worker.state is State.READY]
        living = len(ready) + sum(worker.state is State.STARTING for worker in workers)
        heard = [one for worker in ready if (one := self._heard.get(worker.id)) is not None and now - one.at <= STALE_S]
        for one in heard:
            one.sample(now, self.rules.recent_s)
        known = len(heard) == len(ready)
        sample = self._measure(heard, len(ready), living, model.outside, now, known=known)
        model.scaler.observe(sample, now)
        waits = [one.load.oldest_wait_s + now - one.at for one in heard if one.load.waiting]
        highest = _highest(workers)
        model.signals = ModelSignals(
            name,
            queue_depth=sum(one.load.waiting for one in heard) + model.outside.requests(now),
            oldest_wait_s=max([*waits, model.outside.since_s(now) if not ready else 0.0]),
            saturation=sample.saturation,
            desired=model.scaler.desired,
            ready=len(ready),
            living=living,
            minimum=self.rules.minimum,
            maximum=self.rules.maximum,
            known=known,
            settled_s=model.scaler.settled_s,
            parts={
                "work": sample.work, "queue": sample.queue, "slots": sample.slots, "blocks": sample.blocks,
            },
            next_ordinal=highest or "",
        )  # fmt: skip
        self._leaving.pop(name, None)
        if self._by_ordinal and highest is not None and model.scaler.desired < living:
            self._leaving[name] = highest

    def _measure(
        self, heard: list[HeardDemand], ready: int, living: int, outside: Outside, now: float, *, known: bool
    ) -> LoadSample:
        rate = mean_rate(heard)
        requests = sum(one.load.waiting + one.load.running for one in heard)
        asked = bool(requests) or outside.is_asked(now) or any(one.tokens_per_s for one in heard)
        if not heard:
            return LoadSample(ready, living, asked=asked, known=known)
        due = sum(one.tokens_per_s for one in heard) + outside.tokens_per_s(now)
        slots = sum(one.load.slots for one in heard)
        blocks = sum(one.load.blocks_total for one in heard)
        return LoadSample(
            ready,
            living,
            work=max(due / rate if rate else 0.0, sum(one.busy_share for one in heard)),
            queue=len(heard) * usual_wait_s(heard) / self.rules.target_ttft_s,
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
