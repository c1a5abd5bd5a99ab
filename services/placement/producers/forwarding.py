"""Offers a bare producer's request to one worker after the other until one accepts it. Pure.

               ┌─ 50 ms of silence (of the worker's, not of a NATS that is away), 503, retryable refusal:
               │                         next ready worker, each at most once
               ▼                                      └─ nobody left ──▶ Failed(no_workers)
    asked ──▶ offered ──refusal that no worker would lift──▶ passed on to the producer
      │        │   ▲
      │        │   └──0.2 s, for up to 10 s── parked ◀── nobody is ready for what a draining worker handed over
      │    Accepted
      │        ▼
      │     watched (`in_flight`) ──▶ ended by its worker, or Failed(worker_lost)
      │
      └── an id that is known (`repeats`) ──▶ offered to the worker that has it, as one more reader of that attempt

The 50 ms grow with a long text, which the worker tokenises before it accepts, and while workers answer late
(`OfferTimeout`). The producer gets at most one terminal frame from placement, and none once the worker's own was seen.
Each offer is one attempt; a worker that accepts a past attempt is told to cancel it. The worker that handed a request
over may let go of it when its successor has started: that one has the blocks by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.decide.decider import Decider
from kvfleet.placement.decide.repeats import KnownRequest
from kvfleet.placement.decide.state import PlacementState
from kvfleet.placement.events import Action, Cancel, Fail, Forward, GenerateAsked, PingWorker, TakenOver, failed_frame
from kvfleet.placement.producers.forwarded import Forwarded, body_of, question_of
from kvfleet.placement.producers.in_flight import OfferTimeout, RequestsInFlight
from kvproto.errors import EXPIRES, DeadlineExceeded, KvfleetError, NoWorkers, Unavailable
from kvproto.messages import (
    TERMINAL,
    Accepted,
    CancelRequest,
    Capsule,
    Failed,
    Frame,
    GenerateRequest,
    Milestone,
    ProducerRequest,
    Watch,
)

ATTACH_S = 1.0  # an offer to the only worker that has it can wait
TOKENISE_S = 2e-6  # per character on top: a worker tokenises text before it accepts (0.5 MB/s is a slow one)
DISCONNECTED_S = 0.1  # until the next look whether silence says anything
CARRY_S = 10.0
PARKED_S = 0.2
LAST_CHANCE_S = 3.0  # of the last candidate; its loss is told within 4 s all the same
UNHEARD_RETRY_S = 1.0  # if no refusal said when


@dataclass(eq=False, slots=True)
class Forwarding:
    """Offers are few and live for milliseconds, but for those that are parked."""

    state: PlacementState
    in_flight: RequestsInFlight
    decider: Decider
    config: PlacementConfig
    forwarded_total: int = 0  # accepted by a worker
    retried_offers_total: int = 0
    late_acceptances_total: int = 0
    attached_total: int = 0  # offers of a repeated request to the worker that has it
    carried_total: int = 0  # requests that a draining worker handed over
    _failures: int = 0
    _offer_timeout: OfferTimeout = field(default_factory=OfferTimeout)

    @property
    def producer_failures_total(self) -> int:
        return self._failures + self.in_flight.lost_total + self.in_flight.cancelled_total

    def max_wait_of(self, ask: ProducerRequest) -> float | None:
        return self.config.max_wait_s if ask.deadline_ms is None else ask.deadline_ms / 1000

    def ask(self, event: GenerateAsked, now: float) -> list[Action]:
        known = self.state.repeats.find((event.tenant, event.request))
        model = event.ask.model or self.state.fleet.name_of(event.model_token) or event.model_token
        max_wait_s = self.max_wait_of(event.ask)
        before = -1 if known is None else known.attempt
        body = body_of(event, model, self.state.placement, self.config.max_producer_priority)
        forwarded = Forwarded(
            "", event.tenant, event.request, event.inbox, event.encoding, before, body, now, max_wait_s,
            session=body.session or "", expect_return_s=event.ask.expect_return_s,
        )  # fmt: skip
        if self._is_full():
            return self._no_room_for(forwarded)
        if known is not None and known.is_there and self.state.fleet.attaches(known.worker):
            return self._attach(forwarded, known, now)
        if self.in_flight.is_read_at(event.request, event.inbox):
            return []  # asked twice: its inbox would get two answers
        self.in_flight.enter(forwarded)
        return self._offer(forwarded, now)

    def _attach(self, forwarded: Forwarded, known: KnownRequest, now: float) -> list[Action]:
        """The worker checks that it is the same request, and repeats everything from the first frame on."""
        self.attached_total += 1
        assert forwarded.body is not None
        body = replace(forwarded.body, attempt=known.attempt)
        if self.in_flight.is_read_at(forwarded.request, forwarded.inbox):
            # Asked twice: one watch is enough.
            forwarded.key = self.in_flight.further_key(forwarded.request)
        else:
            self.in_flight.enter(forwarded)
            forwarded.attached, forwarded.worker, forwarded.due = True, known.worker, now + ATTACH_S
            self.in_flight.offered[forwarded.key] = forwarded
        return [Forward(known.worker, forwarded.tenant, body, forwarded.reply(self.in_flight.inbox_prefix))]

    def _is_full(self) -> bool:
        return len(self.in_flight) >= self.config.max_forwarded

    def _no_room_for(self, forwarded: Forwarded) -> list[Action]:
        error = Unavailable(f"placement watches {self.config.max_forwarded} requests already")
        return [self._failure(forwarded, error), *forwarded.release_source()]

    def carry_on(self, capsule: Capsule, reply: str, now: float) -> list[Action]:
        """Of a draining worker, or a replica that goes. If this replica is full it does not answer: the sender asks
        another one, or tells the producer."""
        body, source = capsule.request, capsule.worker
        held_attempt = body.attempt if capsule.held_attempt is None else capsule.held_attempt
        actions: list[Action] = [TakenOver(reply)] if reply else []
        forwarded = Forwarded(
            "", capsule.tenant, body.request, body.inbox, body.encoding, body.attempt,
            replace(body, watcher=self.state.placement, source=source, handed_over=True, then=""), now,
            tried=[source], carried_until=now + CARRY_S,
            let_go=Cancel(source, CancelRequest(body.request, held_attempt)), successor=body.then,
        )  # fmt: skip
        if self._is_full():
            return [] if reply else self._no_room_for(forwarded)
        for key in list(self.in_flight.keys_of(body.request)):
            held = self.in_flight.find_accepted(key)
            if held is not None and (held.inbox, held.attempt, held.worker) == (body.inbox, body.attempt, source):
                actions += self.in_flight.end(held)
        self.carried_total += 1
        self.in_flight.enter(forwarded)
        return [*actions, *self._offer(forwarded, now)]

    def adopt(self, watch: Watch, now: float) -> list[Action]:
        known = (self.in_flight.find_accepted(key) for key in self.in_flight.keys_of(watch.request))
        if self._is_full() or any(one.watch() == watch for one in known if one is not None):
            return []  # full, or told twice: the answer to the first was late
        forwarded = Forwarded(
            "", watch.tenant, watch.request, watch.inbox, watch.encoding, watch.attempt,
            worker=watch.worker, epoch=watch.epoch,
        )  # fmt: skip
        self.in_flight.enter(forwarded)
        return self.in_flight.adopt(forwarded, now)

    def leave(self, now: float) -> list[Action]:
        """This replica goes: another one gets the capsules that no worker has accepted, other requests fail now."""
        actions: list[Action] = [offered.take_back() for offered in self.in_flight.offered.values()]
        for held in [*self.in_flight.offered.values(), *self.in_flight.parked.values()]:
            self.in_flight.parked.pop(held.key, None)
            capsule = held.capsule(now)
            if capsule is None:
                actions += self._fail(held, Unavailable("this placement goes: ask again"))
            else:
                self.in_flight.end(held)  # the next replica tells the source to let go
                actions.append(capsule)
        return actions + self.in_flight.release_sources()

    def _offer(self, forwarded: Forwarded, now: float) -> list[Action]:
        """Offer to the next worker, park, or fail. `forwarded` is in no table."""
        body = forwarded.body
        assert body is not None
        left_ms = forwarded.left_ms(now)
        attempt, is_first = forwarded.attempt + 1, not forwarded.tried
        try:
            if left_ms is not None and left_ms <= 0:
                raise DeadlineExceeded(f"not accepted within {body.deadline_ms} ms", field="deadline_ms")
            ready = self.state.fleet.ready(body.model).workers
            if not is_first and all(worker.id in forwarded.tried for worker in ready):
                many = f"none of {len(forwarded.tried)} workers took the request"
                raise NoWorkers(many, retry_after_s=forwarded.retry_after_s or UNHEARD_RETRY_S)
            question = question_of(body, attempt, tuple(forwarded.tried), forwarded.max_wait_s if is_first else None)
            question = replace(question, successor=forwarded.successor)
            placement = self.decider.decide(forwarded.tenant, question, now)
        except KvfleetError as error:
            if error.retryable and forwarded.carried_until is not None and now < forwarded.carried_until:
                # Later the workers that refused it are asked again.
                forwarded.due, forwarded.tried = now + PARKED_S, forwarded.tried[:1]
                self.in_flight.parked[forwarded.key] = forwarded
                return []
            return self._fail(forwarded, error)
        forwarded.tried.append(placement.worker)
        forwarded.worker, forwarded.attempt = placement.worker, attempt
        self.retried_offers_total += not is_first and forwarded.carried_until is None
        offer = replace(body, attempt=attempt, deadline_ms=left_ms)
        if not body.handed_over:
            offer = replace(offer, source=placement.source, source_tokens=placement.source_tokens)
        forwarded.offer = offer = replace(offer, then=placement.then)
        sent = self._send(forwarded, offer, now)
        if placement.then:
            sent.append(Forward(placement.then, forwarded.tenant, offer.ahead_from(placement.worker), ""))
        return sent

    def _send(self, forwarded: Forwarded, offer: GenerateRequest, now: float) -> list[Action]:
        forwarded.unheard, forwarded.offered_at = False, now
        forwarded.due = now + self._offer_timeout.seconds + TOKENISE_S * len(offer.text or "")
        self.in_flight.offered[forwarded.key] = forwarded
        return [Forward(forwarded.worker, forwarded.tenant, offer, forwarded.reply(self.in_flight.inbox_prefix))]

    def on_frame(self, key: str, frame: Frame, now: float) -> list[Action]:
        if isinstance(frame, Accepted):
            return self._on_accepted(key, frame, now)
        offered = self.in_flight.offered.get(key)
        if offered is None or offered.attempt != frame.attempt:
            return self.in_flight.on_frame(key, frame, now)
        if isinstance(frame, Failed):
            return self._on_refused(offered, frame, now)
        return self.in_flight.end(offered) if isinstance(frame, TERMINAL) else []

    def on_started(self, worker: str, one: Milestone) -> list[Action]:
        """The worker has the blocks: the one that handed the request over may let go."""
        actions: list[Action] = []
        for key in self.in_flight.keys_of(one.request):
            held = self.in_flight.find(key)
            if held is not None and (held.tenant, held.worker, held.attempt) == (one.tenant, worker, one.attempt):
                actions += held.release_source()
        return actions

    def _on_accepted(self, key: str, frame: Accepted, now: float) -> list[Action]:
        held = self.in_flight.find(key)
        is_parked = key in self.in_flight.parked  # its worker was passed over, and told so
        if held is not None and not is_parked and (held.attempt, held.worker) == (frame.attempt, frame.worker):
            if self.in_flight.offered.pop(key, None) is None:
                return []  # said twice
            if not held.attached:
                self._offer_timeout.answered(now - held.offered_at)
            self.forwarded_total += 1
            held.epoch = frame.epoch
            self.in_flight.watch(held, now)
            return []
        if held is None and key != frame.request:
            return []  # asked twice, or a further reader that has left: the attempt goes on
        self.late_acceptances_total += 1
        self._offer_timeout.was_late()
        if key != frame.request:
            return []
        inbox = held.inbox if held is not None else ""
        return [Cancel(frame.worker, CancelRequest(frame.request, frame.attempt, inbox))]

    def _on_refused(self, offered: Forwarded, refusal: Failed, now: float) -> list[Action]:
        del self.in_flight.offered[offered.key]
        if refusal.retryable and offered.attached:
            # Its worker lacks frames of the attempt, or takes no readers: a new attempt.
            offered.attached = False
            if (known := self.state.repeats.find((offered.tenant, offered.request))) is not None:
                offered.attempt = max(offered.attempt, known.attempt)
            return self._offer(offered, now)
        if refusal.retryable:
            if refusal.retry_after_s is not None:
                least = offered.retry_after_s
                offered.retry_after_s = refusal.retry_after_s if least is None else min(least, refusal.retry_after_s)
            if refusal.field == EXPIRES and offered.body is not None and offered.body.expires_unix_ms is not None:
                # Two clocks disagree, as by ours there is time: any worker may have it, without the date.
                offered.body = replace(offered.body, expires_unix_ms=None)
                offered.tried.remove(offered.worker)
            return self._offer(offered, now)
        self._failures += 1
        return [offered.fail(refusal), *self.in_flight.end(offered, failed=True)]

    def on_nobody_listens(self, key: str, attempt: int, now: float) -> list[Action]:
        """Offer to the next worker at once, and ping the one that does not listen."""
        offered = self.in_flight.offered.get(key)
        if offered is None or offered.attempt != attempt:
            return []
        del self.in_flight.offered[key]
        known = self.state.fleet.workers.get(offered.worker)
        is_suspect = known is not None and self.state.fleet.claim_ping(known, now, suspected=True)
        return [*([PingWorker(offered.worker)] if is_suspect else []), *self._next(offered, now)]

    def on_left(self, worker: str, heard_at: float, now: float) -> list[Action]:
        """Accepted requests are lost after a short grace; offered ones go elsewhere at once."""
        self.in_flight.suspect(worker, heard_at, now)
        actions: list[Action] = []
        for offered in [f for f in self.in_flight.offered.values() if f.worker == worker]:
            del self.in_flight.offered[offered.key]
            actions += self._next(offered, now)
        return actions

    def tick(self, now: float, *, disconnected: bool = False) -> list[Action]:
        """`disconnected`: a worker whose answer did not arrive may be at work; a second one would stream too."""
        actions: list[Action] = []
        for table, do in ((self.in_flight.offered, self._pass_over), (self.in_flight.parked, self._offer)):
            for due in [forwarded for forwarded in table.values() if forwarded.due <= now]:
                if disconnected:
                    due.due, due.unheard = now + DISCONNECTED_S, True
                    continue
                del table[due.key]
                actions += do(due, now)
        return actions + self.in_flight.tick(now)

    def _pass_over(self, silent: Forwarded, now: float) -> list[Action]:
        """It may only be slow: a cancellation keeps it from beginning what goes elsewhere. The last candidate gets more
        time."""
        if silent.unheard and silent.offer is not None and self.state.fleet.attaches(silent.worker):
            left_ms = silent.left_ms(now)
            if left_ms is None or left_ms > 0:
                # The offer or its answer may have been lost: the worker answers once more.
                return self._send(silent, replace(silent.offer, deadline_ms=left_ms, again=True), now)
        if (until := self._last_chance(silent)) > now:
            silent.due = until
            self.in_flight.offered[silent.key] = silent
            return []
        return [silent.take_back(), *self._next(silent, now)]

    def _last_chance(self, silent: Forwarded) -> float:
        body = silent.body
        if body is None or silent.attached or silent.carried_until is not None:
            return silent.due
        if any(worker.id not in silent.tried for worker in self.state.fleet.ready(body.model).workers):
            return silent.due
        until = silent.offered_at + LAST_CHANCE_S + TOKENISE_S * len(body.text or "")
        return until if body.deadline_ms is None else min(until, silent.asked_at + body.deadline_ms / 1000)

    def _next(self, unanswered: Forwarded, now: float) -> list[Action]:
        """Offer to the next worker; of an attached request no other worker has the attempt."""
        if not unanswered.attached:
            return self._offer(unanswered, now)
        why = f"worker {unanswered.worker}, which has the request, did not answer"
        return self._fail(unanswered, Unavailable(why))

    def _fail(self, forwarded: Forwarded, error: KvfleetError) -> list[Action]:
        return [self._failure(forwarded, error), *self.in_flight.end(forwarded, failed=True)]

    def _failure(self, forwarded: Forwarded, error: KvfleetError) -> Fail:
        self._failures += 1
        return forwarded.fail(failed_frame(error, forwarded.request, forwarded.attempt + 1))
