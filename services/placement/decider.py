"""One decision: who should do this? Pure.

Knows the fleet, the bookings and the policies; leaves the load of what it decided booked.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproto.affinity import ring_key
from kvproto.errors import InvalidRequest, ModelNotFound, NoWorkers
from kvproto.messages import Placement, PlaceRequest
from services.placement.bookings import Bookings
from services.placement.fleet import Fleet, Ready, Worker
from services.placement.policies import Policy, Question

CHARACTERS_PER_TOKEN = 4  # of text that nobody has tokenised yet, for bookings only


class Decider:
    """Owned by the core."""

    def __init__(
        self, placement: str, fleet: Fleet, bookings: Bookings, policies: Mapping[str, Policy], default: str
    ) -> None:
        self.default = default
        self.decisions_total = 0
        self.no_worker_total = 0
        self._placement = placement
        self._fleet = fleet
        self._bookings = bookings
        self._policies = policies
        self._policy(default)

    def decide(self, tenant: str, ask: PlaceRequest, now: float) -> Placement:
        """Choose and book. Raises InvalidRequest, NotFound, ModelNotFound, or NoWorkers (retryable)."""
        policy = self._policy(ask.policy or self.default)
        if not self._fleet.is_known(ask.model):
            raise ModelNotFound(f"no worker of this fleet has served {ask.model[:64]!r}", field="model")
        ready = self._fleet.ready(ask.model)
        excluded = _effective(ask.excluded, ready)
        question = Question(
            key=ring_key(tenant, session=ask.session, prompt_ids=ask.prompt_ids, prompt=ask.prompt),
            ask=ask,
            ring=ready.ring,
            excluded=excluded,
            candidates=[w for w in ready.workers if w.id not in excluded] if excluded else ready.workers,
            alive=self._fleet.workers,
            load_of=self.load_of,
        )
        choice = policy.choose(question)
        if choice is None:
            self.no_worker_total += 1
            raise NoWorkers(f"no worker that serves {ask.model[:64]} is ready", field="model")
        worker = self._fleet.workers[choice.worker]
        placement = Placement(
            request=ask.request,
            worker=worker.id,
            attempt=ask.attempt,
            expected_ttft_s=self._expected_ttft_s(worker, len(ask.prompt_ids)),
            policy=policy.name,
            why=choice.why,
            placement=self._placement,
        )
        self._bookings.book((tenant, ask.request), worker.id, _prompt_tokens(ask), now)
        self.decisions_total += 1
        return placement

    def load_of(self, worker: Worker) -> int:
        """Requests at a worker: what it reported and what was placed since."""
        return worker.requests + self._bookings.requests_at(worker.id)

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            raise InvalidRequest(f"{name[:64]!r} is none of {', '.join(self._policies)}", field="policy")
        return policy

    def _expected_ttft_s(self, worker: Worker, prompt_tokens: int) -> float | None:
        """Seconds to prefill what is queued and this prompt, cached nothing; None until the rate was measured."""
        rate = worker.rates.prefill_tokens_per_s
        if not rate or not prompt_tokens:
            return None
        queued = worker.load.queued_prefill_tokens + self._bookings.tokens_at(worker.id)
        return (queued + prompt_tokens) / rate


def _effective(excluded: tuple[str, ...], ready: Ready) -> frozenset[str]:
    """Whom to leave out: all of `excluded` if anybody remains; else its last one alone; else nobody."""
    for names in (frozenset(excluded), frozenset(excluded[-1:])):
        if any(worker.id not in names for worker in ready.workers):
            return names
    return frozenset()


def _prompt_tokens(ask: PlaceRequest) -> int:
    return len(ask.prompt_ids) or len(ask.prompt or "") // CHARACTERS_PER_TOKEN
