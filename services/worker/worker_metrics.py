"""What a worker shows to Prometheus: readings of counters that the loop and the engine keep anyway."""

from __future__ import annotations

from collections.abc import Callable

from kvproto.connection import Connection
from kvproto.messages import Load
from kvservice.metrics import Reading
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


def readings(worker: WorkerLoop, connection: Connection) -> list[Reading]:
    def of_load(field: str) -> Callable[[], float]:
        return lambda: float(getattr(worker.heartbeat().load, field))

    assert all(field in Load.__slots__ for _, _, field in _LOAD)
    out = [Reading(name, text, of_load(field)) for name, text, field in _LOAD]
    return [
        *out,
        Reading(
            "kvfleet_worker_prefill_tokens_per_second",
            "measured",
            lambda: worker.heartbeat().rates.prefill_tokens_per_s,
        ),
        Reading(
            "kvfleet_worker_decode_steps_per_second", "measured", lambda: worker.heartbeat().rates.decode_steps_per_s
        ),
        Reading("kvfleet_worker_requests_total", "requests accepted", lambda: worker.requests_total),
        Reading("kvfleet_worker_requests_refused_total", "requests refused", lambda: worker.refused_total),
        Reading(
            "kvfleet_worker_messages_malformed_total", "messages that could not be read", lambda: worker.malformed_total
        ),
        Reading("kvfleet_worker_frames_dropped_total", "frames NATS did not take", lambda: worker.outbox.dropped_total),
        Reading(
            "kvfleet_worker_milestones_dropped_total",
            "what requests came to, never told to placement: NATS was away for long",
            lambda: worker.milestones.dropped_total,
        ),
        Reading("kvfleet_nats_reconnects_total", "reconnects to NATS", lambda: connection.reconnects_total),
    ]
