"""What a worker shows to Prometheus: readings of counters that the loop and the engine keep anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvproto.connection import Connection
from kvproto.messages import Load, Tier, TierLoad
from kvservice.metrics import LabelledReader, Reading
from services.worker.engine_thread import EngineThread
from services.worker.loop import WorkerLoop

_LOAD = (
    ("kvfleet_worker_requests_waiting", "requests that wait for a slot or for blocks", "waiting"),
    ("kvfleet_worker_requests_running", "sequences that take part in steps", "running"),
    ("kvfleet_worker_blocks_used", "KV blocks that running sequences hold", "blocks_used"),
    ("kvfleet_worker_blocks_cached", "KV blocks with an address in the content index", "blocks_cached"),
    ("kvfleet_worker_blocks", "KV blocks on the device", "blocks_total"),
    ("kvfleet_worker_queued_prefill_tokens", "prompt tokens still to be fed", "queued_prefill_tokens"),
    ("kvfleet_worker_prompt_tokens_total", "prompt tokens of started requests", "prompt_tokens_total"),
    ("kvfleet_worker_hit_tokens_total", "of those, tokens found in the cache", "hit_tokens_total"),
    ("kvfleet_worker_fed_tokens_total", "tokens the model was run on", "fed_tokens_total"),
    ("kvfleet_worker_generated_tokens_total", "tokens generated", "generated_tokens_total"),
    ("kvfleet_worker_preemptions_total", "sequences that gave their blocks to others", "preemptions_total"),
    ("kvfleet_worker_evictions_total", "cached blocks overwritten", "evictions_total"),
)


_TIERS = (Tier.HOST.value, Tier.VAULT.value, Tier.PEER.value)
_TIER_LOAD = (
    ("kvfleet_worker_tier_bytes", "memory that KV blocks take in the tier", "bytes_used"),
    ("kvfleet_worker_tier_capacity_bytes", "memory that KV blocks may take in the tier", "bytes_total"),
    ("kvfleet_worker_tier_blocks", "KV blocks with an address in the tier", "blocks"),
    ("kvfleet_worker_tier_hit_tokens_total", "prompt tokens restored from the tier", "hit_tokens_total"),
    ("kvfleet_worker_tier_restores_total", "restores that brought blocks from the tier", "restores_total"),
    ("kvfleet_worker_tier_restored_bytes_total", "bytes restored from the tier", "restored_bytes_total"),
    ("kvfleet_worker_tier_restore_seconds_total", "time that these restores took", "restore_seconds_total"),
    ("kvfleet_worker_tier_offloaded_blocks_total", "blocks written to the tier", "offloaded_blocks_total"),
    ("kvfleet_worker_tier_evictions_total", "blocks of the tier overwritten", "evictions_total"),
)
_FAILURES = (  # others exist once they happen
    "late", "unwanted", "timeout", "gone", "given_up", "checksum", "format", "missing", "wrong", "quarantined",
)  # fmt: skip


def _tier_readings(loads: Callable[[], Mapping[str, TierLoad]]) -> list[Reading]:
    """By tier, and failures by reason too; every worker has all tiers, some of them at 0."""

    def known() -> dict[str, TierLoad]:
        return {tier: TierLoad() for tier in _TIERS} | dict(loads())

    def of_field(field: str) -> LabelledReader:
        return lambda: {(tier,): float(getattr(load, field)) for tier, load in known().items()}

    def failures() -> dict[tuple[str, ...], float]:
        return {
            (tier, reason): float(count)
            for tier, load in known().items()
            for reason, count in (dict.fromkeys(_FAILURES, 0) | load.failures_total).items()
        }

    assert all(field in TierLoad.__slots__ for _, _, field in _TIER_LOAD)
    return [
        *(Reading(name, text, labels=("tier",), read_labelled=of_field(field)) for name, text, field in _TIER_LOAD),
        Reading(
            "kvfleet_worker_tier_failures_total",
            "blocks not had from the tier, or not in time",
            labels=("tier", "reason"),
            read_labelled=failures,
        ),
    ]


def _engine_readings(engine: EngineThread) -> list[Reading]:
    times = engine.cancel_to_free
    return [
        Reading(
            "kvfleet_worker_cancel_to_free_seconds",
            "from a cancel to when the blocks of what it ended were free",
            read_histogram=lambda: (times.buckets(), times.sum_s),
        ),
        Reading("kvfleet_worker_cancel_to_free_max_seconds", "the longest of these", lambda: times.max_s),
        Reading(
            "kvfleet_worker_steps_aborted_total",
            "steps given up because all they computed for was cancelled",
            lambda: engine.steps_aborted_total,
        ),
        Reading(
            "kvfleet_worker_protected_blocks_total",
            "blocks of running sequences given to vaults so that a crash costs less",
            lambda: engine.protected_blocks_total,
        ),
    ]


def readings(worker: WorkerLoop, connection: Connection, engine: EngineThread) -> list[Reading]:
    def of_load(field: str) -> Callable[[], float]:
        return lambda: float(getattr(worker.heartbeat().load, field))

    assert all(field in Load.__slots__ for _, _, field in _LOAD)
    out = [Reading(name, text, of_load(field)) for name, text, field in _LOAD]
    return [
        *out,
        *_tier_readings(lambda: worker.heartbeat().load.tiers),
        *_engine_readings(engine),
        Reading(
            "kvfleet_worker_prefill_tokens_per_second",
            "measured",
            lambda: worker.heartbeat().rates.prefill_tokens_per_s,
        ),
        Reading(
            "kvfleet_worker_decode_steps_per_second", "measured", lambda: worker.heartbeat().rates.decode_steps_per_s
        ),
        Reading("kvfleet_worker_moved_total", "requests handed over", lambda: worker.hand_over.moved_total),
        Reading(
            "kvfleet_worker_recomputed_tokens_total",
            "tokens of continued requests that an earlier attempt had computed",
            lambda: worker.frames.recomputed_total,
        ),
        Reading(
            "kvfleet_worker_step_seconds", "the longest of the last steps", lambda: worker.heartbeat().rates.step_s
        ),
        Reading(
            "kvfleet_worker_step_age_seconds",
            "how long the present step has taken so far",
            lambda: engine.step_age_s,
        ),
        Reading("kvfleet_worker_requests_total", "requests accepted", lambda: worker.requests.requests_total),
        Reading("kvfleet_worker_requests_refused_total", "requests refused", lambda: worker.requests.refused_total),
        Reading(
            "kvfleet_worker_messages_malformed_total",
            "messages that could not be read",
            lambda: worker.requests.malformed_total,
        ),
        Reading("kvfleet_worker_frames_dropped_total", "frames NATS did not take", lambda: worker.outbox.dropped_total),
        Reading(
            "kvfleet_worker_milestones_dropped_total",
            "what requests came to, never told to placement: NATS was away for long",
            lambda: worker.milestones.dropped_total,
        ),
        Reading("kvfleet_nats_reconnects_total", "reconnects to NATS", lambda: connection.reconnects_total),
    ]
