"""What a worker shows to Prometheus: readings of counters that the loop and the engine keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvfleet.worker.port.engine_port import EnginePort
from kvfleet.worker.port.tenant_costs import TenantAccount
from kvfleet.worker.serve.loop import WorkerLoop
from kvproto.connection import Connection
from kvproto.messages import Tier, TierLoad
from kvservice.metrics import LabelledReader, Reader, Reading, common_readings

# Name without `kvfleet_worker_`, help, and the attribute to read.
_LOAD = (
    ("waiting_requests", "requests that wait for a slot or for blocks", "waiting"),
    ("running_requests", "sequences that take part in steps", "running"),
    ("used_blocks", "KV blocks that running sequences hold", "blocks_used"),
    ("cached_blocks", "KV blocks with an address in the content index", "blocks_cached"),
    ("blocks", "KV blocks on the device", "blocks_total"),
    ("queued_prefill_tokens", "prompt tokens still to be fed", "queued_prefill_tokens"),
    ("prompt_tokens_total", "prompt tokens of started requests", "prompt_tokens_total"),
    ("hit_tokens_total", "of those, tokens found in the cache", "hit_tokens_total"),
    ("fed_tokens_total", "tokens the model was run on", "fed_tokens_total"),
    ("generated_tokens_total", "tokens generated", "generated_tokens_total"),
    ("preemptions_total", "sequences that gave their blocks to others", "preemptions_total"),
    ("evictions_total", "cached blocks overwritten", "evictions_total"),
)
_RATES = (
    ("prefill_tokens_per_second", "measured", "prefill_tokens_per_s"),
    ("decode_steps_per_second", "measured", "decode_steps_per_s"),
    ("step_seconds", "the longest of the last steps", "step_s"),
)
_TIER_LOAD = (
    ("tier_bytes", "memory that KV blocks take in the tier", "bytes_used"),
    ("tier_capacity_bytes", "memory that KV blocks may take in the tier", "bytes_total"),
    ("tier_blocks", "KV blocks with an address in the tier", "blocks"),
    ("tier_hit_tokens_total", "prompt tokens found in the tier, or brought from it", "hit_tokens_total"),
    ("tier_restores_total", "restores that brought blocks from the tier", "restores_total"),
    ("tier_restored_bytes_total", "bytes restored from the tier", "restored_bytes_total"),
    ("tier_restore_seconds_total", "time that these restores took", "restore_seconds_total"),
    ("tier_offloaded_blocks_total", "blocks written to the tier", "offloaded_blocks_total"),
    ("tier_evictions_total", "blocks of the tier overwritten", "evictions_total"),
)
_TENANT = (
    ("tenant_engine_seconds_total", "seconds of steps, shared by the tokens that each ran on", "engine_seconds"),
    ("tenant_prompt_tokens_total", "prompt tokens of started requests", "prompt_tokens"),
    ("tenant_cached_tokens_total", "of those, tokens found in a cache", "cached_tokens"),
    ("tenant_generated_tokens_total", "tokens generated", "generated_tokens"),
)
_WORKER = (
    ("moved_requests_total", "requests handed over", "hand_over.moved_total"),
    (
        "ahead_blocks_total",
        "blocks of prompts at prefill workers, fetched before the request came",
        "requests.ahead.blocks_total",
    ),
    ("requests_total", "requests accepted", "requests.requests_total"),
    ("refused_requests_total", "requests refused", "requests.refused_total"),
    ("malformed_messages_total", "messages that could not be read", "requests.malformed_total"),
    (
        "recomputed_tokens_total",
        "tokens of continued requests that an earlier attempt had computed",
        "frames.recomputed_total",
    ),
    ("dropped_frames_total", "frames NATS did not take", "outbox.dropped_total"),
    (
        "dropped_milestones_total",
        "what requests came to, never told to placement: NATS was away for long",
        "milestones.dropped_total",
    ),
)
_ENGINE = (
    ("step_age_seconds", "how long the present step has taken so far", "step_age_s"),
    ("steps_total", "steps of the engine", "counters.steps_total"),
    ("engine_busy_seconds_total", "time in steps: its rate is how busy the engine is", "counters.busy_seconds_total"),
    (
        "aborted_steps_total",
        "steps given up because all they computed for was cancelled",
        "counters.steps_aborted_total",
    ),
    ("cancel_to_free_max_seconds", "the longest of these", "cancel_to_free.max"),
)
_TIERS = (Tier.DEVICE.value, Tier.HOST.value, Tier.VAULT.value, Tier.PEER.value)
_FAILURES = (  # others exist once they happen
    "late", "unwanted", "timeout", "gone", "given_up", "checksum", "format", "missing", "wrong", "quarantined",
)  # fmt: skip

Fields = tuple[tuple[str, str, str], ...]


def reading(name: str, text: str, read: Reader | None = None, **more: Any) -> Reading:
    return Reading(f"kvfleet_worker_{name}", text, read, **more)


def plain(fields: Fields, read: Callable[[], object]) -> list[Reading]:
    def of_field(field: str) -> Reader:
        value = attrgetter(field)
        return lambda: float(value(read()))

    return [reading(name, text, of_field(field)) for name, text, field in fields]


def labelled(name: str, labels: tuple[str, ...], text: str, read: LabelledReader) -> Reading:
    return reading(name, text, labels=labels, read_labelled=read)


def _by_label(
    label: str, fields: Fields, read: Callable[[], Mapping[str, TierLoad] | Mapping[str, TenantAccount]]
) -> list[Reading]:
    def of_field(field: str) -> LabelledReader:
        return lambda: {(key,): float(getattr(one, field)) for key, one in read().items()}

    return [labelled(name, (label,), text, of_field(field)) for name, text, field in fields]


def _tier_readings(worker: WorkerLoop, engine: EnginePort) -> list[Reading]:
    """Every worker shows all tiers, some of them at 0."""

    def known() -> dict[str, TierLoad]:
        load, block_bytes = worker.heartbeat().load, worker.record.block_bytes
        device = TierLoad(
            blocks=load.blocks_addressed,
            bytes_used=(load.blocks_used + load.blocks_cached) * block_bytes,
            bytes_total=load.blocks_total * block_bytes,
            hit_tokens_total=engine.counters.device_hit_tokens_total,
            evictions_total=load.evictions_total,
        )
        return dict.fromkeys(_TIERS, TierLoad()) | {Tier.DEVICE.value: device} | dict(load.tiers)

    def failures() -> dict[tuple[str, ...], float]:
        return {
            (tier, reason): float(count)
            for tier, load in known().items()
            for reason, count in (dict.fromkeys(_FAILURES, 0) | load.failures_total).items()
        }

    text = "blocks not had from the tier, or not in time"
    return [*_by_label("tier", _TIER_LOAD, known), labelled("tier_failures_total", ("tier", "reason"), text, failures)]


def readings(
    worker: WorkerLoop, connection: Connection, certificates: Mapping[str, str | Path | None] = {}
) -> list[Reading]:
    engine = worker.parts.engine
    free = "from a cancel to when the blocks of what it ended were free"
    wait = "from a request's coming to its first step"
    return [
        *plain(_LOAD, lambda: worker.heartbeat().load),
        *plain(_RATES, lambda: worker.heartbeat().rates),
        *_tier_readings(worker, engine),
        *_by_label("tenant", _TENANT, lambda: engine.counters.costs.accounts),
        *plain(_WORKER, lambda: worker),
        *plain(_ENGINE, lambda: engine),
        reading("cancel_to_free_seconds", free, read_histogram=engine.cancel_to_free.read),
        reading("queue_wait_seconds", wait, read_histogram=engine.counters.queue_waits.read),
        *common_readings("worker", connection, certificates),
    ]
