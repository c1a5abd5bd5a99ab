"""What GET /v1/placements and /v1/placements/{id} say: decisions of placement and what became of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvproto.errors import InvalidRequest
from kvproto.ids import is_token
from kvproto.messages import Actual, Candidate, Decision

# `chatcmpl-<request>` and `cmpl-<request>` are how OpenAI's answers show an id drawn here: 128 bits in base32.
_OPENAI_ID = re.compile(r"(?:chatcmpl|cmpl)-([a-z2-7]{26})\Z")


def read_request_id(said: str) -> str:
    """The request behind an id as clients see it. Raises InvalidRequest for what can be none."""
    openai = _OPENAI_ID.match(said)
    if openai is not None:
        return openai[1]
    if not is_token(said):
        raise InvalidRequest(f"must be 1 to 64 of A-Z a-z 0-9 _ -, got {said[:80]!r}", field="id")
    return said


def placements_report(request: str, decisions: Sequence[Decision]) -> dict[str, Any]:
    """One entry per attempt, oldest first."""
    return {"request_id": request, "attempts": [_attempt(decision) for decision in decisions]}


def newest_report(decisions: Iterable[Decision]) -> dict[str, Any]:
    """One entry per attempt of any request, in the order given."""
    return {"placements": [{"request_id": decision.request, **_attempt(decision)} for decision in decisions]}


def _attempt(decision: Decision) -> dict[str, Any]:
    return {
        "attempt": decision.attempt,
        "decided_unix_ms": decision.unix_ms,
        "placement_id": decision.placement,
        "tenant": decision.tenant,
        "model": decision.model,
        "policy": decision.policy,
        "worker_id": decision.worker,
        "why": decision.why,
        "prompt_tokens": decision.prompt_tokens,
        "expected_hit_tokens": decision.expected_hit,
        "expected_ttft_ms": _ms(decision.expected_ttft_s),
        "source_worker_id": decision.source or None,
        "source_tokens": decision.source_tokens,
        "candidates": [_candidate(one, decision.worker) for one in decision.candidates],
        "candidates_total": decision.candidates_total,
        "actual": _actual(decision.actual),
    }


def _candidate(candidate: Candidate, chosen: str) -> dict[str, Any]:
    return {
        "worker_id": candidate.worker,
        "chosen": candidate.worker == chosen,
        "cost_ms": candidate.cost_ms if candidate.terms else None,  # a policy that does not reckon has none
        "terms_ms": candidate.terms,
        "matched_tokens": candidate.matched,
    }


def _actual(actual: Actual) -> dict[str, Any]:
    return {
        "accepted": actual.accepted,
        "cached_tokens": actual.cached,
        "queue_ms": _ms(actual.queue_s),
        "ttft_ms": _ms(actual.ttft_s),
        "output_tokens": actual.output_tokens,
        "ended": actual.ended,
        "error_code": actual.code,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
