"""What /v1/models, /workers, /stats, /sessions and the probes answer: the types, which `openapi` describes, and those
of the fleet from one reader's view of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from kvfleet.ingress.http.answer_types import Described, Natural, told
from kvproto.fleet_view import FleetView, WorkerView
from kvproto.messages import Load, Rates, Role, State, TierLoad, WorkerRecord


class ModelAnswer(Described):
    id: str
    object: Literal["model"]
    created: Natural
    owned_by: str
    max_model_len: Natural


class ModelsAnswer(Described):
    object: Literal["list"]
    data: list[ModelAnswer]


class WorkerAnswer(Described):
    address: str
    state: State
    model: str
    model_revision: str
    epoch: str
    pid: Natural
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


class DeletedAnswer(Described):
    seq_id: str
    deleted: Literal[True]


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
    """Every known worker by id, the recently dead ones included; `address_of`: the subject where it takes requests."""
    return {worker: _worker(view.workers[worker], address_of(worker)) for worker in sorted(view.workers)}


def _worker(view: WorkerView, address: str) -> WorkerAnswer:
    beat = view.heartbeat
    load, rates, held = (beat.load, beat.rates, beat.held) if beat else (Load(), Rates(), 0)
    said = {"address": address, "state": view.state, "load": asdict(load), "rates": asdict(rates), "blocks_held": held}
    return told(WorkerAnswer, view.record, **said)


def stats_report(view: FleetView, ingress: IngressCounts) -> StatsAnswer:
    """Sums over the living workers, and the share of prompt tokens that were found cached."""
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
        models=sorted({one.record.model for one in alive}),
        hit_rate=load["hit_tokens_total"] / prompt if prompt else 0.0,
        load=load,
        rates=_sum_rates([beat.rates for beat in beats]),
        ingress=ingress,
    )


def members_of(view: FleetView, role: Role) -> int:
    """How many processes of a role other than worker are registered."""
    return sum(one is role for one, _ in view.members)


def _sums(kind: type[Load | Rates | TierLoad], values: Sequence[Any], but: Sequence[str]) -> dict[str, Any]:
    """Field by field."""
    names = (one.name for one in fields(kind) if one.name not in but)
    return {name: sum(getattr(one, name) for one in values) for name in names}


def _sum_rates(rates: Sequence[Rates]) -> dict[str, Any]:
    """Tier by tier where a rate has one for each; of the times of a step the longest."""
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


def models_report(records: Iterable[WorkerRecord]) -> ModelsAnswer:
    """OpenAI's list of models."""
    return ModelsAnswer(
        "list",
        [
            ModelAnswer(one.model, "model", one.started_unix_ms // 1000, "kvfleet", one.context_length)
            for one in records
        ],
    )
