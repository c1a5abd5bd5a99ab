"""What a worker is told of vLLM's steps, from what vLLM's scheduler shows a connector. Pure; imports nothing of vLLM.

    added ──▶ scheduled ──▶ ... ──▶ finished
                  ▲           │
                  └───────────┘ preempted

The scheduler's objects are read here and nowhere else. Both model runners are understood: the second one gets what
comes back after a preemption among the new requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvfleet_vllm.wire import EngineStep, Message, Scheduled

# Several choices of one request are children, with a number before; the end is drawn by vLLM.
_CHOICE = re.compile(r"\d+_")
_ID = re.compile(r"(?:\d+_)?generate-tokens-(.+?)(?:-[0-9a-f]{8})?")


class StepNews:
    """Follows every request, and names those that are the worker's own."""

    def __init__(self) -> None:
        self._live: dict[str, Any] = {}  # vLLM's requests, whose token counts grow
        self._own: dict[str, str] = {}  # vLLM's id to the worker's
        self._prefilling: dict[str, int] = {}  # tokens still to be computed before the next new one
        self._preempted: list[str] = []  # not told yet
        self._previous: float | None = None  # when the last step was scheduled, if there was work ever since
        self._last_s = 0.0  # what the step took that ended the work

    def added(self, request: Any, own: bool) -> None:
        self._live[request.request_id] = request
        if own:
            self._own[request.request_id] = name_of(request.request_id)

    def finished(self, request: str, now: float) -> None:
        for of_requests in (self._live, self._own, self._prefilling):
            of_requests.pop(request, None)
        if not self._live and self._previous is not None:
            self._last_s, self._previous = now - self._previous, None

    def step(self, output: Any, now: float, cached: Mapping[str, int]) -> list[Message]:
        """News of the step that `output` (vLLM's SchedulerOutput) describes, scheduled at `now` (monotonic seconds).
        `cached` has the requests that restored blocks, and how many tokens vLLM had itself."""
        for request in output.preempted_req_ids or ():
            self._prefilling.pop(request, None)
            if request in self._own:
                self._preempted.append(self._own[request])
        if not output.total_num_scheduled_tokens:
            self._previous = None
            return []
        started = list(_started(output))
        for request, computed in started:
            if request in self._live:
                self._prefilling[request] = self._live[request].num_tokens - computed
        news: list[Message] = [self._step(output, now)]
        for request, had in started:
            if request in self._own:
                alone = min(had, cached.get(request, had))
                news.append(Scheduled(self._own[request], alone, had - alone))
        return news

    def _step(self, output: Any, now: float) -> EngineStep:
        scheduled = output.num_scheduled_tokens
        prefill = 0
        for request, left in list(self._prefilling.items()):
            took = min(scheduled.get(request, 0), left)
            prefill += took
            self._prefilling[request] = left - took
            if took == left:
                del self._prefilling[request]
        seconds = self._last_s if self._previous is None else now - self._previous
        self._last_s = 0.0
        preempted, self._preempted, self._previous = tuple(self._preempted), [], now
        return EngineStep(seconds, len(scheduled), output.total_num_scheduled_tokens, prefill, preempted)


def _started(output: Any) -> Iterator[tuple[str, int]]:
    """Requests that got their blocks in this step, and how many of their tokens had been computed before."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request in cached.resumed_req_ids:
                yield request, computed


def computed_tokens(output: Any) -> Iterator[tuple[str, int]]:
    """Of each request of the step, how many tokens are computed when it ends, drafts that may be dropped included."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request, computed + scheduled.get(request, 0)


def is_choice(request: str) -> bool:
    """One of several sequences of one request, which have one name."""
    return _CHOICE.match(request) is not None


def name_of(request: str) -> str:
    """The id that was sent over HTTP, from the scheduler's `generate-tokens-<id>-<8 hex digits>`."""
    found = _ID.fullmatch(request)
    return found[1] if found else request
