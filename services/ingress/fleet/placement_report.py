"""What GET /v1/placements and /v1/placements/{id} answer: the types, which `openapi` describes, made of decisions of
placement and what became of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvfleet.ingress.http.answer_types import Described, Natural, told
from kvproto.errors import InvalidRequest
from kvproto.ids import is_token
from kvproto.messages import Actual, Candidate, Decision

# `chatcmpl-<request>` and `cmpl-<request>` are how OpenAI's answers show an id drawn here: 128 bits in base32.
_OPENAI_ID = re.compile(r"(?:chatcmpl|cmpl)-([a-z2-7]{26})\Z")
TokensByTier = dict[str, Natural]


class CandidateAnswer(Described):
    worker_id: str
    chosen: bool
    cost_ms: float | None
    terms_ms: dict[str, float]
    matched_tokens: TokensByTier


class ActualAnswer(Described):
    accepted: bool
    cached_tokens: TokensByTier | None
    queue_ms: float | None
    ttft_ms: float | None
    output_tokens: Natural
    ended: bool
    error_code: str | None


class AttemptAnswer(Described):
    attempt: Natural
    decided_unix_ms: Natural
    placement_id: str
    tenant: str
    model: str
    policy: str
    worker_id: str
    why: str
    prompt_tokens: Natural
    expected_hit_tokens: TokensByTier
    expected_ttft_ms: float | None
    source_worker_id: str | None
    source_tokens: Natural
    candidates: list[CandidateAnswer]
    candidates_total: Natural
    actual: ActualAnswer


class _OfRequest(Described):
    request_id: str


class PlacementsAnswer(_OfRequest):
    """Oldest first."""

    attempts: list[AttemptAnswer]


class NewestAttempt(AttemptAnswer, _OfRequest):
    """Of any request, which it names first."""


Attempt = TypeVar("Attempt", bound=AttemptAnswer)


class NewestPlacementsAnswer(Described):
    placements: list[NewestAttempt]


def read_request_id(said: str) -> str:
    """The request behind an id as clients see it. Raises InvalidRequest for what can be none."""
    openai = _OPENAI_ID.match(said)
    if openai is not None:
        return openai[1]
    if not is_token(said):
        raise InvalidRequest(f"must be 1 to 64 of A-Z a-z 0-9 _ -, got {said[:80]!r}", field="id")
    return said


def placements_report(request: str, decisions: Sequence[Decision]) -> PlacementsAnswer:
    """One entry per attempt, in the order given."""
    return PlacementsAnswer(request, [_attempt(AttemptAnswer, decision) for decision in decisions])


def newest_report(decisions: Iterable[Decision]) -> NewestPlacementsAnswer:
    """One entry per attempt of any request, in the order given."""
    found = [_attempt(NewestAttempt, decision, request_id=decision.request) for decision in decisions]
    return NewestPlacementsAnswer(found)


def _attempt(kind: type[Attempt], decision: Decision, **named: str) -> Attempt:
    return told(
        kind,
        decision,
        **named,
        decided_unix_ms=decision.unix_ms,
        placement_id=decision.placement,
        worker_id=decision.worker,
        expected_hit_tokens=decision.expected_hit,
        expected_ttft_ms=_ms(decision.expected_ttft_s),
        source_worker_id=decision.source or None,
        candidates=[_candidate(one, decision.worker) for one in decision.candidates],
        actual=_actual(decision.actual),
    )


def _candidate(candidate: Candidate, chosen: str) -> CandidateAnswer:
    cost_ms = candidate.cost_ms if candidate.terms else None  # a policy that does not reckon has none
    return CandidateAnswer(candidate.worker, candidate.worker == chosen, cost_ms, candidate.terms, candidate.matched)


def _actual(actual: Actual) -> ActualAnswer:
    return told(
        ActualAnswer,
        actual,
        cached_tokens=actual.cached,
        queue_ms=_ms(actual.queue_s),
        ttft_ms=_ms(actual.ttft_s),
        error_code=actual.code,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
