"""A placement replica's Prometheus metrics: readings of its core.

A scrape runs on a thread beside the loop: it copies what it goes through, and values may be a moment apart. Series of
a worker begin with it, at 0, and end with it; those of a model begin when it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path

from kvfleet.placement.advice.autoscale import PARTS
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.workers.feedback import Belief
from kvfleet.placement.workers.fleet import Worker, metrics_of
from kvproto.connection import Connection
from kvservice.metrics import Reading, common_readings

PREFIX = "kvfleet_placement_"  # of all names but those of workers and models

Labelled = Mapping[tuple[str, ...], float]

# Rows of these tables are a metric's name, its attribute, and its help. Here names lack the prefix, and attributes are
# the loop's. Attained and lost hits add up to attainable: lost ones are lost by placing, others are cold.
COUNTED = (
    ("internal_errors_total", "internal_errors_total", "faults of ours"),
    ("malformed_messages_total", "malformed_total", "messages refused as wrong"),
    ("unsent_messages_total", "unsent_total", "messages NATS did not take"),
    ("undrained_workers_total", "core.undrained_total",
     "workers that went without having drained: killed, crashed, or cut off"),
    ("decisions_total", "core.decider.decisions_total", "requests placed"),
    ("pairs_total", "core.decider.pairing.pairs_total", "prompts placed at a prefill worker, to go on at another one"),
    ("saved_restore_seconds_total", "core.ledger.saved_s_total",
     "restoring, done while conversations paused, that placed requests did not wait for"),
    ("sourced_decisions_total", "core.decider.sourced_total", "requests placed with the name of a worker to pull from"),
    ("unplaced_requests_total", "core.decider.no_worker_total", "requests nobody could serve"),
    ("overloaded_requests_total", "core.decider.turned_away.refused_total",
     "requests refused because they would have had to wait for too long"),
    ("forwarded_requests_total", "core.forwarding.forwarded_total", "bare requests a worker accepted"),
    ("producer_failures_total", "core.forwarding.producer_failures_total", "terminal failures sent to bare producers"),
    ("retried_offers_total", "core.forwarding.retried_offers_total", "offers made to a further worker"),
    ("late_acceptances_total", "core.forwarding.late_acceptances_total",
     "acceptances by workers that had been given up on"),
    ("attached_requests_total", "core.forwarding.attached_total",
     "repeated bare requests offered to the worker that has them"),
    ("carried_requests_total", "core.forwarding.carried_total", "bare requests taken over from draining workers"),
    ("lost_requests_total", "core.in_flight.lost_total",
     "bare requests whose worker was lost after it accepted"),
    ("running_requests", "core.bookings.running", "booked requests that a worker accepted and that have not ended"),
    ("phantom_requests_total", "core.bookings.phantoms_total",
     "requests that no longer count, as their tenant has too many placed that no worker has accepted"),
    ("prompt_tokens_total", "core.ledger.hits.prompt_total", "prompt tokens of started requests"),
    ("attained_hit_tokens_total", "core.ledger.hits.attained_total", "of them, those found in a cache"),
    ("attainable_hit_tokens_total", "core.ledger.hits.attainable_total",
     "of them, those that some candidate had cached"),
    ("lost_hit_tokens_total", "core.ledger.hits.lost_total", "attainable and not attained, request by request"),
    ("referred_requests_total", "core.region_summaries.referred_total",
     "requests that were told to ask another region"),
    ("hinted_requests_total", "core.region_summaries.hinted_total",
     "requests that were told of a region that may have more of their prompt"),
    ("known_regions", "core.region_summaries.regions.fresh_count", "other regions that can be counted on"),
    ("index_left_out_workers_total", "core.indexer.left_out_total", "workers not followed for want of room"),
    ("unknown_events_total", "core.indexer.unknown_total", "block events of workers, or lives, that are no members"),
    ("index_capacity_blocks", "core.indexer.index.max_blocks", "most blocks it can know"),
    ("index_bytes", "core.indexer.index.nbytes", "memory of the index"),
    ("index_given_up_blocks_total", "core.indexer.index.given_up_total",
     "blocks left out, or taken out, for want of room"),
    ("late_requests_total", "desk.late_total", "requests not decided because nobody would have waited for the answer"),
    ("stood_back_total", "desk.stood_back_total",
     "times it took no more requests until it had decided most of those that it had"),
    ("decision_seconds_total", "desk.decision_seconds_total", "own time of decisions"),
    ("preload_answers_total", "question_desk.preload_answers_total", "new workers told what to preload"),
    ("pulled_snapshots_total", "executor.snapshots_asked_total", "snapshots asked of workers and vaults"),
    ("malformed_events_total", "subscriptions.malformed_events_total", "block events that were unreadable"),
)  # fmt: skip
OF_LOAD = (  # values have NVIDIA Dynamo's names; metrics end in units
    ("kvfleet_request_active_slots", "request_active_slots", "slots with a request"),
    ("kvfleet_request_total_slots", "request_total_slots", "most requests at once"),
    ("kvfleet_kv_active_blocks", "kv_active_blocks", "KV blocks of running requests"),
    ("kvfleet_kv_total_blocks", "kv_total_blocks", "KV blocks"),
    ("kvfleet_waiting_requests", "num_requests_waiting", "requests without a slot"),
    ("kvfleet_gpu_cache_usage_ratio", "gpu_cache_usage_perc", "KV blocks in use, of all"),
    ("kvfleet_gpu_prefix_cache_hit_ratio", "gpu_prefix_cache_hit_rate",
     "prompt tokens of the last minute found cached, of all"),
)  # fmt: skip
OF_FEEDBACK = (  # what the index said of a worker against what its requests found
    (f"{PREFIX}predicted_hit_tokens_total", "predicted_tokens_total", "tokens that the index said requests would find"),
    (f"{PREFIX}missing_hit_tokens_total", "missing_tokens_total", "of them, those that were not there"),
    (f"{PREFIX}unpredicted_hit_tokens_total", "unpredicted_tokens_total",
     "tokens found there that the index had not said: predicted minus actual is missing minus these"),
)  # fmt: skip
OF_MODEL = (  # the autoscaling signals
    ("kvfleet_model_queue_depth_requests", "queue_depth",
     "requests that wait at workers, are on their way there, or were refused just now"),
    ("kvfleet_model_oldest_wait_seconds", "oldest_wait_s", "how long the oldest of those that wait has waited"),
    ("kvfleet_model_saturation_ratio", "saturation",
     "work to be done, of what the model's ready workers can do within the TTFT target"),
    ("kvfleet_model_desired_replicas", "desired", "workers that the model should have"),
    ("kvfleet_model_ready_replicas", "ready", "workers of the model that take work"),
)  # fmt: skip


def readings(
    loop: PlacementLoop, connection: Connection, certificates: Mapping[str, str | Path | None] = {}
) -> list[Reading]:
    core = loop.core

    def workers() -> list[Worker]:
        return list(core.fleet.workers.values())

    def loads() -> Iterable[tuple[str, object]]:
        return [(one.id, metrics_of(one, core.bookings.requests_at(one.id))) for one in workers()]

    def beliefs() -> Labelled:
        now = {one.id: one.experience.belief for one in workers()}
        return {(worker, each.value): float(each is held) for worker, held in now.items() for each in Belief}

    def needs() -> Labelled:
        return {(one.model, part): one.parts.get(part, 0.0) for one in core.autoscaler.signals() for part in PARTS}

    def followers() -> Labelled:
        return {(state.value,): count for state, count in core.followers().items()}

    belief = "1 for how far a worker's index is believed now"
    need = "workers that would just be busy, by what is to be done; the largest part counts"
    followed = "workers by how exactly their blocks are known"
    return [
        *_counted(loop),
        *_of_each("worker", OF_LOAD, loads),
        *_of_each("worker", OF_FEEDBACK, lambda: [(one.id, one.experience) for one in workers()]),
        Reading(f"{PREFIX}belief", belief, labels=("worker", "belief"), read_labelled=beliefs),
        *common_readings("placement", connection, certificates),
        *_of_each("model", OF_MODEL, lambda: [(one.model, one) for one in core.autoscaler.signals()]),
        Reading("kvfleet_model_needed_replicas", need, labels=("model", "part"), read_labelled=needs),
        Reading(f"{PREFIX}followed_workers", followed, labels=("state",), read_labelled=followers),
    ]


def _counted(loop: PlacementLoop) -> Iterable[Reading]:
    for name, path, help_ in COUNTED:
        yield Reading(PREFIX + name, help_, partial(attrgetter(path), loop))
    core, indexer = loop.core, loop.core.indexer
    for name, read, help_ in (
        ("booked_requests", core.bookings.__len__, "requests booked at workers"),
        ("promised_requests", core.inflight.__len__, "requests whose blocks are expected where they were placed"),
        ("expected_returns", core.returns.__len__, "conversations that pause and are expected back"),
        ("ledger_decisions", core.ledger.__len__, "decisions that can be explained"),
        ("index_blocks", indexer.index.__len__, "blocks known to be held by somebody"),
        ("followed_vaults", lambda: indexer.vaults()[0], "vaults whose blocks are known"),
        ("vault_blocks", lambda: indexer.vaults()[1], "blocks in them; one that several have counts for each"),
    ):
        yield Reading(PREFIX + name, help_, read)


def _of_each(
    label: str, rows: Iterable[tuple[str, str, str]], each: Callable[[], Iterable[tuple[str, object]]]
) -> Iterable[Reading]:
    """Each metric of a table, of each worker or model: `each` gives its name and what has the attributes."""

    def read(attribute: str) -> Labelled:
        return {(name,): getattr(one, attribute) for name, one in each()}

    for metric, attribute, help_ in rows:
        yield Reading(metric, help_, labels=(label,), read_labelled=partial(read, attribute))
