"""The double's scheduler: which tokens of which requests a step computes, and what comes of it. Pure.

    waiting, least priority number first ──blocks, a slot──▶ running ──a token a step──▶ ended
       ▲──────────────────── preempted, as blocks are short ────┘

A long prompt is computed in chunks. `Output` has the fields of vLLM's SchedulerOutput that the connector reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from tests.support.vllm_double import toy_model
from tests.support.vllm_double.block_cache import Block, BlockCache, Lora, hashes_of


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: list[int]
    params: Mapping[str, Any]  # vLLM's sampling_params
    salt: str | None
    priority: int
    kv_transfer_params: Any
    max_tokens: int
    lora: Lora | None = None
    arrival: int = 0
    outputs: list[int] = field(default_factory=list)  # live, as the sampler sees it
    blocks: list[Block] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    named: int = 0  # of its blocks
    computed: int = 0
    state: int = toy_model.FIRST
    cached: int | None = None  # tokens that it found at first
    is_resumed: bool = False
    states: list[int] = field(default_factory=list)  # after each token of a prompt that is to be scored
    finish: str | None = None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.outputs]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)

    @property
    def wants_scores(self) -> bool:
        return self.params.get("prompt_logprobs") is not None

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.arrival


@dataclass(eq=False, slots=True)
class Part:
    """Of a step: what it computes of a request, whatever becomes of that meanwhile."""

    request: Request
    tokens: int
    start: int
    ids: list[int]
    blocks: list[Block]


@dataclass(eq=False)
class Output:
    parts: list[Part] = field(default_factory=list)
    dropped: list[Part] = field(default_factory=list)  # of the preempted: their blocks have names already
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = field(
        default_factory=lambda: SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    )

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {part.request.request_id: part.tokens for part in self.parts}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


@dataclass(eq=False)
class Scheduler:
    cache: BlockCache
    slots: int
    step_tokens: int
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    computed_total: int = 0
    _arrivals: count[int] = field(default_factory=count)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        return next((one for one in (*self.running, *self.waiting) if one.request_id == request_id), None)

    def schedule(self) -> Output:
        output, budget = Output(), self.step_tokens
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            tokens = min(request.num_tokens - request.computed, budget)
            while not self._fits(request, tokens):
                victim = max(self.running, key=lambda one: one.order)
                self._preempt(victim, output)
                if victim is request:
                    break
            else:
                budget -= self._put(output, request, tokens)
        while self.waiting and budget and len(self.running) < self.slots and not output.preempted_req_ids:
            request = min(self.waiting, key=lambda one: one.order)
            request.hashes = hashes_of(request.salt, request.ids, self.cache.size, request.lora)
            reused = 0 if request.wants_scores else (request.num_tokens - 1) // self.cache.size
            found = self.cache.find(request.hashes[:reused])
            self.cache.take(found)
            computed = len(found) * self.cache.size
            request.blocks, request.named, request.computed = list(found), len(found), computed
            tokens = min(request.num_tokens - computed, budget)
            if not self._fits(request, tokens):
                self._drop_blocks(request)
                break
            self.waiting.remove(request)
            self.running.append(request)
            self._tell_started(output, request)
            budget -= self._put(output, request, tokens)
        return output

    def finish(self, request: Request, reason: str) -> None:
        if request.finish is None:
            request.finish = reason
            for some in (self.waiting, self.running):
                if request in some:
                    some.remove(request)
            self._drop_blocks(request)

    def compute(self, output: Output) -> list[Request]:
        """Returns those that need their next token."""
        size = self.cache.size
        for part in (*output.parts, *output.dropped):
            lora = part.request.lora
            first = toy_model.FIRST if lora is None else toy_model.after(toy_model.FIRST, [lora.weights])
            before = part.blocks[part.start // size - 1].state if part.start else first
            state = before if part.start % size == 0 else part.request.state
            for at in range(part.start, part.start + part.tokens):
                state = toy_model.after(state, part.ids[at : at + 1])
                part.request.states[at:] = [state]
                if (at + 1) % size == 0:
                    part.blocks[at // size].state = state
            part.request.state = state
        for part in output.parts:
            if part.request.finish is None:
                part.request.computed += part.tokens
                self.computed_total += part.tokens
        live = [part.request for part in output.parts if part.request.finish is None]
        return [request for request in live if request.computed == request.num_tokens]

    def _fits(self, request: Request, tokens: int) -> bool:
        """Whether it has blocks for so many more tokens now."""
        needed = -(-(request.computed + tokens) // self.cache.size) - len(request.blocks)
        if needed > self.cache.free:
            return False
        request.blocks += self.cache.allocate(max(needed, 0))
        return True

    def _put(self, output: Output, request: Request, tokens: int) -> int:
        output.parts.append(Part(request, tokens, request.computed, request.ids, list(request.blocks)))
        full = (request.computed + tokens) // self.cache.size
        if full > request.named:
            ids: Sequence[int] = request.ids[: full * self.cache.size]
            if len(request.hashes) < full:
                request.hashes = hashes_of(request.salt, ids, self.cache.size, request.lora)
            named, hashes = request.blocks[request.named : full], request.hashes[:full]
            self.cache.store(named, hashes, ids, request.salt, request.lora)
            request.named = full
        return tokens

    def _tell_started(self, output: Output, request: Request) -> None:
        if request.is_resumed:
            again = output.scheduled_cached_reqs
            again.req_ids.append(request.request_id)
            again.num_computed_tokens.append(request.computed)
            again.resumed_req_ids.add(request.request_id)
        else:
            request.cached = request.computed
            output.scheduled_new_reqs.append(
                SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.computed)
            )

    def _preempt(self, request: Request, output: Output) -> None:
        output.preempted_req_ids.add(request.request_id)
        output.dropped += [part for part in output.parts if part.request is request]
        output.parts = [part for part in output.parts if part.request is not request]
        self.running.remove(request)
        self.waiting.append(request)
        self._drop_blocks(request)
        request.computed, request.is_resumed = 0, True

    def _drop_blocks(self, request: Request) -> None:
        self.cache.release(request.blocks)
        request.blocks, request.named = [], 0
