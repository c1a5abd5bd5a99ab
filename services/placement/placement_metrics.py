"""What a placement replica shows to Prometheus: readings of what its core keeps anyway.

The core's own names of a worker's load, those of NVIDIA Dynamo, end in units here:

    request_active_slots, request_total_slots   kvfleet_request_active_slots, kvfleet_request_total_slots
    kv_active_blocks, kv_total_blocks           kvfleet_kv_active_blocks, kvfleet_kv_total_blocks
    num_requests_waiting                        kvfleet_waiting_requests
    gpu_cache_usage_perc                        kvfleet_gpu_cache_usage_ratio
    gpu_prefix_cache_hit_rate                   kvfleet_gpu_prefix_cache_hit_ratio

A scrape runs on a thread beside the loop: it copies what it goes through, and values may be a moment apart. Series of
a worker exist from its joining on, at 0, and end with it; of a model from the moment it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path

from kvfleet.placement.advice.autoscale import PARTS
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.workers.feedback import Belief
from kvfleet.placement.workers.fleet import Worker
from kvproto.connection import Connection
from kvservice.metrics import Reading
from kvservice.process_metrics import common_readings

PREFIX = "kvfleet_placement_"  # of all names but those of workers and models
PER_WORKER, PER_MODEL = ("worker",), ("model",)

Labelled = Mapping[tuple[str, ...], float]

# By who counts it, as the loop knows that one: the attribute, the metric's name without its prefix, its help.
# Attained and lost hits add up to attainable: what is lost is lost by placing, what is not attainable is cold.
COUNTED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "": (
        ("internal_errors_total", "internal_errors_total", "faults of ours"),
        ("malformed_total", "malformed_messages_total", "messages refused as wrong"),
        ("unsent_total", "unsent_messages_total", "messages NATS did not take"),
    ),
    "core": (
        (
            "undrained_total",
            "undrained_workers_total",
            "workers that went without having drained: killed, crashed, or cut off",
        ),
    ),
    "core.decider": (
        ("decisions_total", "decisions_total", "requests placed"),
        ("sourced_total", "sourced_decisions_total", "requests placed with the name of a worker to pull from"),
        ("no_worker_total", "unplaced_requests_total", "requests nobody could serve"),
    ),
    "core.decider.turned_away": (
        (
            "refused_total",
            "overloaded_requests_total",
            "requests refused because they would have had to wait for too long",
        ),
    ),
    "core.forwarding": (
        ("forwarded_total", "forwarded_requests_total", "bare requests a worker accepted"),
        ("producer_failures_total", "producer_failures_total", "terminal failures sent to bare producers"),
        ("retried_offers_total", "retried_offers_total", "offers made to a further worker"),
        ("late_acceptances_total", "late_acceptances_total", "acceptances by workers that had been given up on"),
        ("attached_total", "attached_requests_total", "repeated bare requests offered to the worker that has them"),
        ("carried_total", "carried_requests_total", "bare requests taken over from draining workers"),
    ),
    "core.in_flight.accepted": (
        ("lost_total", "lost_requests_total", "bare requests whose worker was lost after it accepted"),
    ),
    "core.bookings": (
        ("running", "running_requests", "booked requests that a worker accepted and that have not ended"),
        (
            "phantoms_total",
            "phantom_requests_total",
            "requests that no longer count, as their tenant has too many placed that no worker has accepted",
        ),
    ),
    "core.ledger.hits": (
        ("prompt_total", "prompt_tokens_total", "prompt tokens of started requests"),
        ("attained_total", "attained_hit_tokens_total", "of them, those found in a cache"),
        ("attainable_total", "attainable_hit_tokens_total", "of them, those that some candidate had cached"),
        ("lost_total", "lost_hit_tokens_total", "attainable and not attained, request by request"),
    ),
    "core.region_summaries": (
        ("referred_total", "referred_requests_total", "requests that were told to ask another region"),
        (
            "hinted_total",
            "hinted_requests_total",
            "requests that were told of a region that may have more of their prompt",
        ),
    ),
    "core.region_summaries.regions": (("fresh_count", "known_regions", "other regions that can be counted on"),),
    "core.indexer": (
        ("left_out_total", "index_left_out_workers_total", "workers not followed for want of room"),
        ("unknown_total", "unknown_events_total", "block events of workers, or lives, that are no members"),
    ),
    "core.indexer.index": (
        ("max_blocks", "index_capacity_blocks", "most blocks it can know"),
        ("nbytes", "index_bytes", "memory of the index"),
        ("given_up_total", "index_given_up_blocks_total", "blocks left out, or taken out, for want of room"),
    ),
    "desk": (
        ("late_total", "late_requests_total", "requests not decided because nobody would have waited for the answer"),
        (
            "stood_back_total",
            "stood_back_total",
            "times it took no more requests until it had decided most of those that it had",
        ),
        ("decision_seconds_total", "decision_seconds_total", "own time of decisions"),
    ),
    "question_desk": (("preload_answers_total", "preload_answers_total", "new workers told what to preload"),),
    "subscriptions": (
        ("snapshots_asked_total", "pulled_snapshots_total", "snapshots asked of workers and vaults"),
        ("malformed_events_total", "malformed_events_total", "block events that were unreadable"),
    ),
}
OF_LOAD = (
    ("request_active_slots", "kvfleet_request_active_slots", "slots with a request"),
    ("request_total_slots", "kvfleet_request_total_slots", "most requests at once"),
    ("kv_active_blocks", "kvfleet_kv_active_blocks", "KV blocks of running requests"),
    ("kv_total_blocks", "kvfleet_kv_total_blocks", "KV blocks"),
    ("num_requests_waiting", "kvfleet_waiting_requests", "requests without a slot"),
    ("gpu_cache_usage_perc", "kvfleet_gpu_cache_usage_ratio", "KV blocks in use, of all"),
    (
        "gpu_prefix_cache_hit_rate",
        "kvfleet_gpu_prefix_cache_hit_ratio",
        "prompt tokens of the last minute found cached, of all",
    ),
)
OF_FEEDBACK = (  # what the index said of a worker against what its requests found
    (
        "predicted_tokens_total",
        f"{PREFIX}predicted_hit_tokens_total",
        "tokens that the index said requests would find",
    ),
    ("missing_tokens_total", f"{PREFIX}missing_hit_tokens_total", "of them, those that were not there"),
    (
        "unpredicted_tokens_total",
        f"{PREFIX}unpredicted_hit_tokens_total",
        "tokens found there that the index had not said: predicted minus actual is missing minus these",
    ),
)
OF_MODEL = (  # the autoscaling signals
    (
        "queue_depth",
        "kvfleet_model_queue_depth_requests",
        "requests that wait at workers, are on their way there, or were refused just now",
    ),
    ("oldest_wait_s", "kvfleet_model_oldest_wait_seconds", "how long the oldest of those that wait has waited"),
    (
        "saturation",
        "kvfleet_model_saturation_ratio",
        "work to be done, of what the model's ready workers can do within the TTFT target",
    ),
    ("desired", "kvfleet_model_desired_replicas", "workers that the model should have"),
    ("ready", "kvfleet_model_ready_replicas", "workers of the model that take work"),
)


def readings(
    loop: PlacementLoop, connection: Connection, certificates: Mapping[str, str | Path | None] = {}
) -> list[Reading]:
    core = loop.core
    return [
        *_counted(loop),
        *_per_worker(core, lambda worker: core.metrics.of(worker.id), OF_LOAD),
        *_of_feedback(core),
        *common_readings("placement", connection, certificates),
        *_of_models(core),
        Reading(
            f"{PREFIX}followed_workers",
            "workers by how exactly their blocks are known",
            labels=("state",),
            read_labelled=lambda: {(state.value,): count for state, count in core.followers().items()},
        ),
    ]


def _counted(loop: PlacementLoop) -> Iterable[Reading]:
    for path, rows in COUNTED.items():
        owner = attrgetter(path)(loop) if path else loop
        for attribute, name, help_ in rows:
            yield Reading(PREFIX + name, help_, partial(getattr, owner, attribute))
    core, indexer = loop.core, loop.core.indexer
    yield from (
        Reading(PREFIX + name, help_, read)
        for name, help_, read in (
            ("booked_requests", "requests booked at workers", core.bookings.__len__),
            (
                "promised_requests",
                "requests whose blocks are expected where they were placed",
                core.inflight.__len__,
            ),
            ("ledger_decisions", "decisions that can be explained", core.ledger.__len__),
            ("index_blocks", "blocks known to be held by somebody", indexer.index.__len__),
            ("followed_vaults", "vaults whose blocks are known", lambda: indexer.vaults()[0]),
            ("vault_blocks", "blocks in them; one that several have counts for each", lambda: indexer.vaults()[1]),
        )
    )


def _per_worker(
    core: PlacementCore, of: Callable[[Worker], object], rows: Iterable[tuple[str, str, str]]
) -> Iterable[Reading]:
    def read(attribute: str) -> Labelled:
        return {(worker.id,): getattr(of(worker), attribute) for worker in list(core.fleet.workers.values())}

    for attribute, name, help_ in rows:
        yield Reading(name, help_, labels=PER_WORKER, read_labelled=partial(read, attribute))


def _of_feedback(core: PlacementCore) -> Iterable[Reading]:
    def beliefs() -> Labelled:
        now = {worker.id: worker.experience.belief for worker in list(core.fleet.workers.values())}
        return {(worker, each.value): float(each is held) for worker, held in now.items() for each in Belief}

    yield from _per_worker(core, lambda worker: worker.experience, OF_FEEDBACK)
    yield Reading(
        f"{PREFIX}belief",
        "1 for how far a worker's index is believed now",
        labels=(*PER_WORKER, "belief"),
        read_labelled=beliefs,
    )


def _of_models(core: PlacementCore) -> Iterable[Reading]:
    def read(attribute: str) -> Labelled:
        return {(one.model,): getattr(one, attribute) for one in core.autoscaler.signals()}

    def parts() -> Labelled:
        return {(one.model, part): one.parts.get(part, 0.0) for one in core.autoscaler.signals() for part in PARTS}

    for attribute, name, help_ in OF_MODEL:
        yield Reading(name, help_, labels=PER_MODEL, read_labelled=partial(read, attribute))
    yield Reading(
        "kvfleet_model_needed_replicas",
        "workers that would just be busy, by what is to be done; the largest part counts",
        labels=("model", "part"),
        read_labelled=parts,
    )
