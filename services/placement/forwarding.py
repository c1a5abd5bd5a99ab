"""The life of a bare producer's request at placement: offered, accepted, watched to its end. Pure.

                      ┌─ 50 ms of silence, 503, retryable refusal: next ready worker, each at most once
                      ▼                                          └─ nobody left ──▶ Failed(no_workers)
    asked ──▶ offered to a worker ──refusal that no worker would lift──▶ passed on to the producer
                      │
                   Accepted
                      ▼
                  watched ──terminal notice (the worker told the producer itself)──▶ over
                      │ ▲
       worker left,   │ │ back within 0.1 s, same life
       restarted or   ▼ │
       silent       lost ──0.1 s──▶ Failed(worker_lost)

The 50 ms grow with a long text, which the worker tokenises before it accepts. Every arrow to "over" or to a Failed
ends the request here, so the producer gets at most one terminal frame from placement, and none once the worker's own
was seen. Each offer is one attempt; a worker that accepts an attempt nobody waits for any more is told to cancel it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvproto.errors import DeadlineExceeded, InvalidRequest, KvfleetError, NoWorkers, Unavailable, WorkerLost
from kvproto.messages import (
    TERMINAL,
    Accepted,
    CancelRequest,
    Failed,
    Frame,
    GenerateRequest,
    PlaceRequest,
    Progress,
    ResendRequest,
    Sampling,
)
from kvproto.subjects import request_inbox
from services.placement.actions import Action, AskStillRunning, Cancel, Fail, Forward, PingWorker, failed_frame
from services.placement.decider import Decider
from services.placement.events import GenerateAsked
from services.placement.fleet import Fleet

ACKNOWLEDGE_S = 0.05  # an offer not accepted by then goes to the next worker
TOKENISE_S = 2e-6  # per character on top: a worker tokenises text before it accepts (0.5 MB/s is a slow one)
LOST_GRACE_S = 0.1  # a terminal notice may still be on its way when its worker is seen to leave
ASK_AGAIN_S = 15.0  # a notice lost in an outage would be waited for for ever
ASKS_LIMIT = 4
ORPHANS_KEPT_S = 60.0  # a hung worker that wakes is told what to cancel
NOTHING_TO_RESEND = 2**62  # from this index on: only the question "are you still there?"


@dataclass(slots=True)
class _Forwarded:
    """One producer's request in flight. `attempt` counts offers from 0."""

    asked: GenerateAsked
    model: str
    asked_at: float
    tried: list[str] = field(default_factory=list)
    due: float = 0.0  # of its present state: acknowledgement, next question, or end of the grace
    epoch: str = ""  # the life of the worker that accepted
    asks: int = 0  # questions since the worker's last word

    @property
    def attempt(self) -> int:
        return len(self.tried) - 1

    @property
    def worker(self) -> str:
        return self.tried[-1]


class Forwarding:
    """Owned by the core. Tables of watched and lost requests are ordered by `due`: each has one constant delay.

    Offers are not, as their patience grows with the text; but they are few and live for milliseconds.
    """

    def __init__(
        self,
        placement: str,
        inbox_prefix: str,
        fleet: Fleet,
        give_up: Callable[[tuple[str, str]], None],
        decider: Decider,
        limit: int,
    ) -> None:
        self.forwarded_total = 0  # accepted by a worker
        self.retried_offers_total = 0
        self.late_acceptances_total = 0
        self.producer_failures_total = 0  # terminal failures sent to producers
        self.workers_lost_total = 0  # of those, after acceptance
        self.watches_abandoned_total = 0
        self._placement = placement
        self._inbox_prefix = inbox_prefix
        self._fleet = fleet
        self._give_up = give_up  # what a request had booked
        self._decider = decider
        self._limit = limit
        self._offered: dict[str, _Forwarded] = {}
        self._watched: dict[str, _Forwarded] = {}
        self._lost: dict[str, _Forwarded] = {}
        self._orphans: dict[str, list[tuple[float, Cancel]]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._offered) + len(self._watched) + len(self._lost)

    def is_in_flight(self, request: str) -> bool:
        return request in self._offered or request in self._watched or request in self._lost

    def wake_at(self) -> float | None:
        """When the earliest offer or grace is due; questions are not urgent enough to count."""
        due = [offered.due for offered in self._offered.values()]
        if self._lost:
            due.append(next(iter(self._lost.values())).due)
        return min(due, default=None)

    # ------------------------------------------------------------------ a request comes

    def ask(self, event: GenerateAsked, now: float) -> list[Action]:
        try:
            forwarded = self._admit(event, now)
        except KvfleetError as error:
            return [self._failure(event, error, 0)]
        return self._offer(forwarded, now)

    def _admit(self, event: GenerateAsked, now: float) -> _Forwarded:
        if self.is_in_flight(event.request):
            raise InvalidRequest("a request of this id is running", field="request")
        if self.in_flight >= self._limit:
            raise Unavailable(f"placement watches {self._limit} requests already")
        model = event.ask.model or self._fleet.name_of(event.model_token) or event.model_token
        return _Forwarded(event, model, now)

    def _offer(self, forwarded: _Forwarded, now: float) -> list[Action]:
        """Offer to the next worker, or fail. `forwarded` is in no table."""
        asked, ask = forwarded.asked, forwarded.asked.ask
        left_ms = None if ask.deadline_ms is None else ask.deadline_ms - int((now - forwarded.asked_at) * 1000)
        attempt = len(forwarded.tried)
        try:
            if left_ms is not None and left_ms <= 0:
                raise DeadlineExceeded(f"not accepted within {ask.deadline_ms} ms", field="deadline_ms")
            ready = self._fleet.ready(forwarded.model).workers
            if forwarded.tried and all(worker.id in forwarded.tried for worker in ready):
                raise NoWorkers(f"none of {len(forwarded.tried)} workers took the request")
            placement = self._decider.decide(
                asked.tenant,
                PlaceRequest(
                    request=asked.request,
                    model=forwarded.model,
                    prompt_ids=ask.prompt_ids,
                    prompt=ask.prompt,
                    session=ask.session,
                    attempt=attempt,
                    excluded=tuple(forwarded.tried),
                    max_tokens=ask.max_tokens * ask.n,
                ),
                now,
            )
        except KvfleetError as error:
            return self._fail(forwarded, error)
        forwarded.tried.append(placement.worker)
        forwarded.due = now + ACKNOWLEDGE_S + TOKENISE_S * len(ask.prompt or "")
        self._offered[asked.request] = forwarded
        self.retried_offers_total += attempt > 0
        request = GenerateRequest(
            request=asked.request,
            attempt=attempt,
            model=forwarded.model,
            sampling=Sampling(
                max_tokens=ask.max_tokens,
                temperature=ask.temperature,
                top_p=ask.top_p,
                top_k=ask.top_k,
                seed=asked.seed,
                stop=ask.stop,
                ignore_eos=ask.ignore_eos,
                n=ask.n,
                min_p=ask.min_p,
                presence_penalty=ask.presence_penalty,
                frequency_penalty=ask.frequency_penalty,
                repetition_penalty=ask.repetition_penalty,
                logit_bias=ask.logit_bias,
                logprobs=ask.logprobs,
                min_tokens=ask.min_tokens,
                overflow=ask.context_overflow,
            ),
            inbox=asked.inbox,
            prompt_ids=ask.prompt_ids,
            prompt=ask.prompt,
            encoding=asked.encoding,
            session=ask.session,
            priority=ask.priority,
            deadline_ms=left_ms,
            expires_unix_ms=None if ask.deadline_ms is None else min(asked.unix_ms + ask.deadline_ms, 2**53),
            traceparent=ask.traceparent,
            watcher=self._placement,
            source=placement.source,
            source_tokens=placement.source_tokens,
            exact=ask.exact,
        )
        return [Forward(placement.worker, asked.tenant, request, self._reply(forwarded))]

    # ------------------------------------------------------------------ workers answer

    def on_frame(self, frame: Frame, now: float) -> list[Action]:
        request = frame.request
        if isinstance(frame, Accepted):
            return self._on_accepted(frame, now)
        offered = self._offered.get(request)
        if offered is not None and offered.attempt == frame.attempt:
            if isinstance(frame, Failed):
                return self._on_refused(offered, frame, now)
            if isinstance(frame, TERMINAL):
                self._end(offered)
            return []
        held = self._watched.get(request) or self._lost.get(request)
        if held is None or held.attempt != frame.attempt:
            return []
        if isinstance(frame, Failed) and frame.code == WorkerLost.code and held.asks:
            return self._lose(held)  # the answer to our question: it forgot the request, so nobody else will end it
        if isinstance(frame, TERMINAL):
            self._end(held)
        elif isinstance(frame, Progress) and request in self._watched:
            self._watch(held, now)
        return []

    def _on_accepted(self, frame: Accepted, now: float) -> list[Action]:
        offered = self._offered.get(frame.request)
        if offered is not None and (offered.attempt, offered.worker) == (frame.attempt, frame.worker):
            self.forwarded_total += 1
            offered.epoch = frame.epoch
            self._watch(offered, now)
            known = self._fleet.workers.get(frame.worker)
            if known is not None and frame.epoch < known.epoch:
                self._set_lost([offered], now)  # the last word of a life that is over
            return []
        held = self._watched.get(frame.request) or self._lost.get(frame.request)
        if held is not None and (held.attempt, held.worker) == (frame.attempt, frame.worker):
            return []  # said twice
        self.late_acceptances_total += 1
        return [Cancel(frame.worker, CancelRequest(frame.request, frame.attempt))]

    def _on_refused(self, offered: _Forwarded, refusal: Failed, now: float) -> list[Action]:
        del self._offered[offered.asked.request]
        if refusal.retryable:
            return self._offer(offered, now)
        self._end(offered)
        self.producer_failures_total += 1
        return [Fail(offered.asked.inbox, refusal, offered.asked.encoding)]

    def on_nobody_listens(self, request: str, attempt: int, now: float) -> list[Action]:
        """The next worker at once; and whoever is deaf to this request may be dead to all."""
        offered = self._offered.get(request)
        if offered is None or offered.attempt != attempt:
            return []
        del self._offered[request]
        return [*self._ping(offered.worker, now), *self._offer(offered, now)]

    # ------------------------------------------------------------------ workers come and go

    def on_left(self, worker: str, now: float) -> list[Action]:
        """Requests it accepted are lost after a short grace; those it was offered go elsewhere at once."""
        self.suspect(worker, now)
        actions: list[Action] = []
        for offered in [f for f in self._offered.values() if f.worker == worker]:
            del self._offered[offered.asked.request]
            actions += self._offer(offered, now)
        return actions

    def on_new_epoch(self, worker: str, epoch: str, now: float) -> None:
        """What its former life accepted is lost; an offer may have met either life, so its answer decides."""
        self._orphans.pop(worker, None)
        self._set_lost([f for f in self._watched.values() if f.worker == worker and f.epoch != epoch], now)

    def on_joined(self, worker: str, epoch: str, now: float) -> list[Action]:
        """Back in the same life: requests still within their grace go on, those given up are cancelled."""
        for back in [f for f in self._lost.values() if f.worker == worker and f.epoch == epoch]:
            self._watch(back, now)
        return [cancel for _, cancel in self._orphans.pop(worker, [])]

    def suspect(self, worker: str, now: float) -> None:
        """A worker did not answer: its requests are lost unless it shows up within the grace."""
        self._set_lost([f for f in self._watched.values() if f.worker == worker], now)

    # ------------------------------------------------------------------ time passes

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for unanswered in [offered for offered in self._offered.values() if offered.due <= now]:
            del self._offered[unanswered.asked.request]
            actions += self._offer(unanswered, now)
        for lost in _due(self._lost, now):
            actions += self._lose(lost, now)
        for silent in _due(self._watched, now):
            actions += self._ask_or_abandon(silent, now)
        for name, orphans in list(self._orphans.items()):
            if orphans[-1][0] + ORPHANS_KEPT_S < now:
                del self._orphans[name]
        return actions

    def _ask_or_abandon(self, silent: _Forwarded, now: float) -> list[Action]:
        """A worker that answers no question keeps the request; only placement stops watching it."""
        if silent.asks >= ASKS_LIMIT:
            self.watches_abandoned_total += 1
            self._end(silent)
            return []
        asks = silent.asks + 1
        self._watch(silent, now)
        silent.asks = asks
        question = ResendRequest(silent.asked.request, silent.attempt, NOTHING_TO_RESEND, self._reply(silent))
        return [AskStillRunning(silent.worker, question)]

    def _ping(self, worker: str, now: float) -> list[Action]:
        known = self._fleet.workers.get(worker)
        if known is None or not self._fleet.claim_ping(known, now, suspected=True):
            return []
        return [PingWorker(worker)]

    # ------------------------------------------------------------------ states

    def _watch(self, forwarded: _Forwarded, now: float) -> None:
        self._remove(forwarded)
        forwarded.due, forwarded.asks = now + ASK_AGAIN_S, 0
        self._watched[forwarded.asked.request] = forwarded

    def _set_lost(self, gone: list[_Forwarded], now: float) -> None:
        for forwarded in gone:
            self._remove(forwarded)
            forwarded.due = now + LOST_GRACE_S
            self._lost[forwarded.asked.request] = forwarded

    def _lose(self, lost: _Forwarded, gone_at: float | None = None) -> list[Action]:
        """Tell the producer; with `gone_at`, a worker that hangs rather than died is told to stop, now or on waking."""
        self.workers_lost_total += 1
        cancel = Cancel(lost.worker, CancelRequest(lost.asked.request, lost.attempt))
        if gone_at is not None:
            self._orphans.setdefault(lost.worker, []).append((gone_at, cancel))
        return [*self._fail(lost, WorkerLost(f"worker {lost.worker} was lost")), cancel]

    def _fail(self, forwarded: _Forwarded, error: KvfleetError) -> list[Action]:
        self._end(forwarded)
        return [self._failure(forwarded.asked, error, max(forwarded.attempt, 0))]

    def _failure(self, asked: GenerateAsked, error: KvfleetError, attempt: int) -> Fail:
        self.producer_failures_total += 1
        return Fail(asked.inbox, failed_frame(error, asked.request, attempt), asked.encoding)

    def _end(self, forwarded: _Forwarded) -> None:
        self._remove(forwarded)
        self._give_up((forwarded.asked.tenant, forwarded.asked.request))

    def _remove(self, forwarded: _Forwarded) -> None:
        for table in (self._offered, self._watched, self._lost):
            table.pop(forwarded.asked.request, None)

    def _reply(self, forwarded: _Forwarded) -> str:
        """Where the present worker answers. The attempt tells the server's 503s apart, which carry nothing else."""
        return request_inbox(self._inbox_prefix, forwarded.asked.request, forwarded.attempt)

    def check_integrity(self) -> None:
        """Every request is in one state, offered to nobody twice; tables are in order. Raises AssertionError."""
        tables = (self._offered, self._watched, self._lost)
        assert len({*self._offered, *self._watched, *self._lost}) == self.in_flight
        for table in tables[1:]:
            dues = [f.due for f in table.values()]
            assert dues == sorted(dues)
        for table in tables:
            assert all(f.tried and len(set(f.tried)) == len(f.tried) for f in table.values())
        assert all(f.epoch for table in tables[1:] for f in table.values())
        assert all(self._orphans.values())


def _due(table: dict[str, _Forwarded], now: float) -> list[_Forwarded]:
    due = []
    for forwarded in table.values():
        if forwarded.due > now:
            break
        due.append(forwarded)
    return due
