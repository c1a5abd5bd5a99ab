"""One process of the double: scheduler, model, sampler, connector and events, until it is ended. Loop.

schedule ──connector, events──▶ compute, for `step_s` ──sampler──▶ tokens ──▶ one queue for each request

The steps of a hung one stop; its HTTP server goes on.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from kvfleet_vllm.row_sampling import SampledRow, choose
from kvfleet_vllm.scheduler_side import SchedulerSide
from kvfleet_vllm.wire import KEY, EngineHello
from kvproto.tasks import end
from tests.support.vllm_double import toy_model
from tests.support.vllm_double.block_cache import BlockCache, Lora
from tests.support.vllm_double.event_publisher import EventPublisher
from tests.support.vllm_double.made_with import MadeWith, Spoiled
from tests.support.vllm_double.scheduler import Request, Scheduler


@dataclass(frozen=True, slots=True)
class Told:
    """What a client is told next: a token with its log probabilities, an end, or an error."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, int]] | None = None
    finish: str | None = None
    stop: int | None = None
    error: str | None = None


@dataclass(eq=False)
class Engine:
    made: MadeWith
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    queues: dict[str, asyncio.Queue[Told]] = field(default_factory=lambda: defaultdict(asyncio.Queue))
    steps: int = 0
    spoiled: list[Spoiled] = field(default_factory=list)  # for the next requests, one each
    spoiling: dict[str, Spoiled] = field(default_factory=dict)
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.cache = BlockCache(self.made.blocks, self.made.block_size)
        self.scheduler = Scheduler(self.cache, self.made.slots, self.made.step_tokens)
        self.connector = SchedulerSide(self._hello)
        self.connector.pool = self.cache
        self.runs.set()

    def start(self) -> None:
        self.events = EventPublisher(self.made.events_go_to or self.made.events, self.made.replay, self.made.topic)
        self._task = asyncio.create_task(self._run(), name="vllm-double")

    async def die(self) -> None:
        await end([self._task])
        self.connector.close()
        await self.events.close()

    def add(self, request: Request) -> asyncio.Queue[Told]:
        request.request_id += f"-{next(self._ends):08x}"
        if self.spoiled and request.priority > -1000:
            self.spoiling[request.request_id] = self.spoiled.pop(0)
        if self.made.has_connector:
            self.connector.request_added(request)
        self.scheduler.add(request)
        self._work.set()
        return self.queues[request.request_id]

    def abort(self, prefix: str) -> None:
        """All requests of this id. Their readers are told."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.request_id.startswith(prefix + "-") or request.request_id == prefix:
                self._finish(request, Told(finish="abort"))

    def _hello(self) -> EngineHello:
        return EngineHello(self.made.wire_version, self.instance, os.getpid(), self.made.version, self.made.facts())

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self.runs.wait()
            if not self.scheduler.has_work:
                self._work.clear()
                continue
            output = self.scheduler.schedule()
            if self.made.has_connector:
                self.connector.step(output)
            await asyncio.sleep(self.made.step_s)
            await self.runs.wait()
            self.steps += 1
            self._sample(self.scheduler.compute(output))
            if self.cache.events:
                events, self.cache.events = self.cache.events, []
                await self.events.say(events)

    def _sample(self, requests: list[Request]) -> None:
        if not requests:
            return
        raw = torch.stack(
            [torch.from_numpy(toy_model.logits(one.state, self.made.vocab_size).copy()) for one in requests]
        )
        rows = {}
        for at, request in enumerate(requests):
            spoiled = self.spoiling.get(request.request_id)
            if spoiled is not None and spoiled.logit is not None and len(request.outputs) == spoiled.after:
                raw[at] = spoiled.logit
            asked = (request.params.get("extra_args") or {}).get(KEY)
            if asked is not None and self.made.has_sampler:
                rows[at] = SampledRow.of(asked, request.prompt, request.outputs)
        changed = raw.clone()
        choose(changed, rows)
        for request, row, token in zip(requests, raw, changed.argmax(-1).tolist(), strict=True):
            self._deliver(request, row, token)

    def _deliver(self, request: Request, row: torch.Tensor, token: int) -> None:
        spoiled = self.spoiling.get(request.request_id)
        if spoiled is not None and len(request.outputs) == spoiled.after and spoiled.told is not None:
            self._finish(request, Told(**spoiled.told))
            return
        request.outputs.append(token)
        stops = token in (request.params.get("stop_token_ids") or ())
        finish = "stop" if stops else "length" if len(request.outputs) >= request.max_tokens else None
        asked = request.params.get("logprobs")
        scored = None if asked is None else toy_model.logprobs(row, token, asked)
        told = Told([token], scored, finish, token if stops else None)
        if finish is None:
            self.queues[request.request_id].put_nowait(told)
        else:
            self._finish(request, told)

    def _finish(self, request: Request, told: Told) -> None:
        self.scheduler.finish(request, told.finish or "error")
        if self.made.has_connector:
            self.connector.request_finished(request.request_id)
        self.spoiling.pop(request.request_id, None)
        self.queues[request.request_id].put_nowait(told)


def request_of(body: Mapping[str, Any], room: int, lora: Lora | None = None) -> Request:
    params = body["sampling_params"]
    asked = params.get("max_tokens")
    return Request(
        f"generate-tokens-{body.get('request_id') or uuid.uuid4().hex}",
        list(body["token_ids"]),
        params,
        body.get("cache_salt"),
        body.get("priority", 0),
        body.get("kv_transfer_params"),
        room if asked is None else min(asked, room),
        lora,
    )
