"""What GET /workers, /stats and /v1/models say, from one reader's view of the fleet. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from kvproto.fleet_view import FleetView, WorkerView
from kvproto.messages import Load, Rates, Role, State, TierLoad, WorkerRecord


def workers_report(view: FleetView, address_of: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Every known worker by id, the recently dead ones included; `address_of`: the subject where it takes requests."""
    return {worker: _worker(view.workers[worker], address_of(worker)) for worker in sorted(view.workers)}


def _worker(view: WorkerView, address: str) -> dict[str, Any]:
    record, beat = view.record, view.heartbeat
    return {
        "address": address,
        "state": view.state.value,
        "model": record.model,
        "model_revision": record.model_revision,
        "epoch": record.epoch,
        "pid": record.pid,
        "host": record.host,
        "started_unix_ms": record.started_unix_ms,
        "block_size": record.block_size,
        "blocks": record.blocks,
        "context_length": record.context_length,
        "slots": record.slots,
        "load": asdict(beat.load if beat else Load()),
        "rates": asdict(beat.rates if beat else Rates()),
        "blocks_held": beat.held if beat else 0,
    }


def stats_report(view: FleetView) -> dict[str, Any]:
    """Sums over the living workers, and the share of prompt tokens that were found cached."""
    alive = [one for one in view.workers.values() if one.dead_since is None]
    beats = [one.heartbeat for one in alive if one.heartbeat is not None]
    plain = (f.name for f in fields(Load) if f.name not in ("tiers", "priorities", "oldest_wait_s"))
    load = {name: sum(getattr(beat.load, name) for beat in beats) for name in plain}
    load["oldest_wait_s"] = max((beat.load.oldest_wait_s for beat in beats), default=0.0)
    rates = _sum_rates([beat.rates for beat in beats])
    prompt = load["prompt_tokens_total"]
    return {
        "workers": len(alive),
        "ready": sum(one.state is State.READY for one in alive),
        "placements": members_of(view, Role.PLACEMENT),
        "vaults": members_of(view, Role.VAULT),
        "models": sorted({one.record.model for one in alive}),
        "hit_rate": load["hit_tokens_total"] / prompt if prompt else 0.0,
        "load": {**load, "tiers": _sum_tiers([beat.load.tiers for beat in beats])},
        "rates": rates,
    }


def members_of(view: FleetView, role: Role) -> int:
    """How many processes of a role other than worker are registered."""
    return sum(one is role for one, _ in view.members)


def _sum_rates(rates: Sequence[Rates]) -> dict[str, Any]:
    """Field by field, and tier by tier where a rate has one for each; of the times of a step the longest."""
    restore = [one.restore_bytes_per_s for one in rates]
    by_tier = {tier: sum(one.get(tier, 0.0) for one in restore) for tier in sorted(set[str]().union(*restore))}
    plain = (f.name for f in fields(Rates) if f.name not in ("restore_bytes_per_s", "step_s"))
    return {name: sum(getattr(one, name) for one in rates) for name in plain} | {
        "restore_bytes_per_s": by_tier,
        "step_s": max((one.step_s for one in rates), default=0.0),
    }


def _sum_tiers(loads: Sequence[Mapping[str, TierLoad]]) -> dict[str, dict[str, Any]]:
    """By tier below the device; failures by reason."""
    out: dict[str, dict[str, Any]] = {}
    for tier in sorted(set[str]().union(*loads)):
        of_tier = [one[tier] for one in loads if tier in one]
        failures = sum((Counter(one.failures_total) for one in of_tier), Counter[str]())
        plain = (f.name for f in fields(TierLoad) if f.name != "failures_total")
        out[tier] = {name: sum(getattr(one, name) for one in of_tier) for name in plain}
        out[tier]["failures_total"] = dict(failures)
    return out


def models_report(records: Iterable[WorkerRecord]) -> dict[str, Any]:
    """OpenAI's list of models."""
    return {
        "object": "list",
        "data": [
            {
                "id": record.model,
                "object": "model",
                "created": record.started_unix_ms // 1000,
                "owned_by": "kvfleet",
                "max_model_len": record.context_length,
            }
            for record in records
        ],
    }
