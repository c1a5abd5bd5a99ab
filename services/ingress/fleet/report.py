"""Answers of the routes that show the fleet, sessions and placements: their types, which `openapi` describes, and how
they are made of messages. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal, TypeVar

from kvfleet.ingress.http.answer_types import Described, Natural, told
from kvproto.errors import InvalidRequest
from kvproto.fleet_view import FleetView, WorkerView
from kvproto.ids import is_token
from kvproto.messages import Actual, Candidate, Decision, Load, Rates, Role, State, TierLoad, WorkerRecord, WorkerRole
from kvservice.return_times import ReturnSpan


class ModelAnswer(Described):
    id: str
    object: Literal["model"]
    created: Natural
    owned_by: str
    max_model_len: Natural
    parent: str | None  # of an adapter: the model that it is of


class ModelsAnswer(Described):
    object: Literal["list"]
    data: list[ModelAnswer]


class LoadingAnswer(Described):
    """What a starting worker does."""

    doing: str
    weight_bytes: Natural
    total_bytes: Natural
    kernels: Natural


class WorkerAnswer(Described):
    address: str
    state: State
    loading: LoadingAnswer | None
    model: str
    model_revision: str
    adapters: list[str]
    epoch: str
    pid: Natural
    engine: str
    engine_pid: Natural
    role: Literal["both", "prefill", "decode"]
    host: str
    started_unix_ms: Natural
    block_size: Natural
    blocks: Natural
    context_length: Natural
    slots: Natural
    load: dict[str, Any]
    rates: dict[str, Any]
    blocks_held: Natural


class IngressCounts(Described):
    """Of this ingress, since it began."""

    id: str
    active_streams: Natural
    generated_tokens_total: Natural
    prompt_tokens_total: Natural
    cached_tokens_total: Natural
    spliced_tokens_total: Natural
    sessions: Natural
    placed_total: Natural
    placement_fallbacks_total: Natural
    lost_attempts_total: Natural


class StatsAnswer(Described):
    workers: Natural
    ready: Natural
    placements: Natural
    vaults: Natural
    models: list[str]
    hit_rate: float
    load: dict[str, Any]
    rates: dict[str, Any]
    ingress: IngressCounts


class LocatedAnswer(Described):
    worker_id: str
    address: str | None
    region: str | None


class SessionAnswer(Described):
    seq_id: str
    model: str
    turns: Natural
    created_unix_ms: Natural
    updated_unix_ms: Natural
    busy: bool
    tokens: Natural
    cached_tokens: Natural
    blocks: list[Natural]
    worker_id: str | None
    address: str | None
    region: str | None
    workers: dict[str, dict[str, Natural]]


class DrainingAnswer(Described):
    worker_id: str
    draining: Literal[True]


class DeletedAnswer(Described):
    seq_id: str
    deleted: Literal[True]


class TokenizeAnswer(Described):
    count: Natural
    max_model_len: Natural
    tokens: list[Natural]
    token_strs: list[str] | None


class DetokenizeAnswer(Described):
    prompt: str


class CountAnswer(Described):
    input_tokens: Natural


class VersionAnswer(Described):
    version: str


class StatusAnswer(Described):
    status: str


class HealthAnswer(Described):
    status: str
    nats: bool
    workers_ready: Natural
    placements: Natural
    vaults: Natural


class KnownHealthAnswer(HealthAnswer):
    """For callers who have a key, or need none."""

    ingress: str
    models: list[str]
    models_unavailable: list[str]


def workers_report(view: FleetView, address_of: Callable[[str], str]) -> dict[str, WorkerAnswer]:
    """Every known worker by id, the recently dead ones included; `address_of` gives its subject for requests."""
    return {worker: _worker(view.workers[worker], address_of(worker)) for worker in sorted(view.workers)}


def _worker(view: WorkerView, address: str) -> WorkerAnswer:
    beat = view.heartbeat
    load, rates, held = (beat.load, beat.rates, beat.held) if beat else (Load(), Rates(), 0)
    said = {
        "adapters": [one.name for one in view.record.adapters],
        "address": address,
        "state": view.state,
        "loading": None if view.record.loading is None else told(LoadingAnswer, view.record.loading),
        "load": asdict(load),
        "rates": asdict(rates),
        "blocks_held": held,
        "role": (view.record.role or WorkerRole.BOTH).value,
    }
    return told(WorkerAnswer, view.record, **said)


def stats_report(view: FleetView, ingress: IngressCounts) -> StatsAnswer:
    """Sums over the living workers."""
    alive = [one for one in view.workers.values() if one.dead_since is None]
    beats = [one.heartbeat for one in alive if one.heartbeat is not None]
    load = _sums(Load, [beat.load for beat in beats], but=("tiers", "priorities", "oldest_wait_s"))
    load["oldest_wait_s"] = max((beat.load.oldest_wait_s for beat in beats), default=0.0)
    load["tiers"] = _sum_tiers([beat.load.tiers for beat in beats])
    prompt = load["prompt_tokens_total"]
    return StatsAnswer(
        workers=len(alive),
        ready=sum(one.state is State.READY for one in alive),
        placements=members_of(view, Role.PLACEMENT),
        vaults=members_of(view, Role.VAULT),
        models=sorted({name for one in alive for name in one.record.models}),
        hit_rate=load["hit_tokens_total"] / prompt if prompt else 0.0,
        load=load,
        rates=_sum_rates([beat.rates for beat in beats]),
        ingress=ingress,
    )


def members_of(view: FleetView, role: Role) -> int:
    """How many processes of a role are registered; not for workers."""
    return sum(one is role for one, _ in view.members)


def _sums(kind: type[Load | Rates | TierLoad], values: Sequence[Any], but: Sequence[str]) -> dict[str, Any]:
    names = (one.name for one in fields(kind) if one.name not in but)
    return {name: sum(getattr(one, name) for one in values) for name in names}


def _sum_rates(rates: Sequence[Rates]) -> dict[str, Any]:
    """Restore rates by tier; the longest of the step times."""
    restore = [one.restore_bytes_per_s for one in rates]
    by_tier = {tier: sum(one.get(tier, 0.0) for one in restore) for tier in sorted(set[str]().union(*restore))}
    return _sums(Rates, rates, but=("restore_bytes_per_s", "step_s")) | {
        "restore_bytes_per_s": by_tier,
        "step_s": max((one.step_s for one in rates), default=0.0),
    }


def _sum_tiers(loads: Sequence[Mapping[str, TierLoad]]) -> dict[str, dict[str, Any]]:
    """By tier below the device; failures by reason."""
    out: dict[str, dict[str, Any]] = {}
    for tier in sorted(set[str]().union(*loads)):
        of_tier = [one[tier] for one in loads if tier in one]
        failures = sum((Counter(one.failures_total) for one in of_tier), Counter[str]())
        out[tier] = _sums(TierLoad, of_tier, but=("failures_total",)) | {"failures_total": dict(failures)}
    return out


def models_report(served: Mapping[str, WorkerRecord]) -> ModelsAnswer:
    """OpenAI's list of models. `served` has a worker's record by each name; an adapter's names its parent."""
    models = [
        ModelAnswer(
            name, "model", one.started_unix_ms // 1000, "kvfleet", one.context_length,
            None if name == one.model else one.model,
        )
        for name, one in served.items()
    ]  # fmt: skip
    return ModelsAnswer("list", models)


# OpenAI's answers show an id drawn here (128 bits in base32) as `chatcmpl-<request>` or `cmpl-<request>`.
_OPENAI_ID = re.compile(r"(?:chatcmpl|cmpl)-([a-z2-7]{26})\Z")
TokensByTier = dict[str, Natural]


class CandidateAnswer(Described):
    worker_id: str
    chosen: bool
    cost_ms: float | None
    terms_ms: dict[str, float]
    matched_tokens: TokensByTier


class ToolAnswer(Described):
    """How long conversations pause when it is called; null while too little is known."""

    tool: str
    pauses: Natural
    soonest_s: float | None
    latest_s: float | None


class PausesAnswer(Described):
    """As this ingress measured it. `restoring_saved_s` is of the last decisions that placement keeps."""

    tools: list[ToolAnswer]
    returns: Natural
    restoring_saved_s: float


class ActualAnswer(Described):
    accepted: bool
    cached_tokens: TokensByTier | None
    queue_ms: float | None
    ttft_ms: float | None
    output_tokens: Natural
    ended: bool
    error_code: str | None
    total_ms: float | None
    saved_ms: float


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
    """Of any request; its `request_id` comes first."""


Attempt = TypeVar("Attempt", bound=AttemptAnswer)


class NewestPlacementsAnswer(Described):
    placements: list[NewestAttempt]


def read_request_id(said: str) -> str:
    """The request behind an id as clients see it. Raises InvalidRequest for a malformed id."""
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
        total_ms=_ms(actual.total_s),
        saved_ms=round(actual.saved_s * 1000, 3),
    )


def pauses_report(known: Mapping[str, tuple[int, ReturnSpan | None]], decisions: Iterable[Decision]) -> PausesAnswer:
    tools = [
        ToolAnswer(tool, count, None if span is None else span.soonest_s, None if span is None else span.latest_s)
        for tool, (count, span) in sorted(known.items())
    ]
    saved = [one.actual.saved_s for one in decisions if one.actual.saved_s]
    return PausesAnswer(tools, len(saved), round(sum(saved), 6))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
