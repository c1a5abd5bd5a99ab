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
from pathlib import Path
from typing import TypeVar

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.record.metrics_aggregator import WorkerMetrics
from kvfleet.placement.workers.feedback import Belief, Experience
from kvproto.connection import Connection
from kvproto.messages import ModelSignals
from kvservice.metrics import Reading
from kvservice.process_metrics import common_readings

PREFIX = "kvfleet_placement_"  # of all names but those of workers and models
PER_WORKER, PER_MODEL = ("worker",), ("model",)
PARTS = ("work", "queue", "slots", "blocks")

Labelled = Mapping[tuple[str, ...], float]
Shown = TypeVar("Shown")


def readings(
    loop: PlacementLoop, connection: Connection, certificates: Mapping[str, str | Path | None] = {}
) -> list[Reading]:
    core = loop.core
    return [
        *(Reading(PREFIX + name, help_, read) for name, help_, read in (*_of_requests(loop), *_of_blocks(loop))),
        *_of_load(core),
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


def _of_requests(loop: PlacementLoop) -> list[tuple[str, str, Callable[[], float]]]:
    """Name, help and value. Attained and lost add up to attainable: what is lost is lost by placing, what is not
    attainable is cold."""
    core, desk, questions = loop.core, loop.desk, loop.question_desk
    decider, forwarding, hits, regions = core.decider, core.forwarding, core.ledger.hits, core.region_summaries
    return [
        ("decisions_total", "requests placed", lambda: decider.decisions_total),
        (
            "sourced_decisions_total",
            "requests placed with the name of a worker to pull from",
            lambda: decider.sourced_total,
        ),
        ("preload_answers_total", "new workers told what to preload", lambda: questions.preload_answers_total),
        ("unplaced_requests_total", "requests nobody could serve", lambda: decider.no_worker_total),
        ("forwarded_requests_total", "bare requests a worker accepted", lambda: forwarding.forwarded_total),
        (
            "producer_failures_total",
            "terminal failures sent to bare producers",
            lambda: forwarding.producer_failures_total,
        ),
        (
            "lost_requests_total",
            "bare requests whose worker was lost after it accepted",
            lambda: core.in_flight.lost_total,
        ),
        (
            "undrained_workers_total",
            "workers that went without having drained: killed, crashed, or cut off",
            lambda: core.undrained_total,
        ),
        ("retried_offers_total", "offers made to a further worker", lambda: forwarding.retried_offers_total),
        (
            "late_acceptances_total",
            "acceptances by workers that had been given up on",
            lambda: forwarding.late_acceptances_total,
        ),
        (
            "attached_requests_total",
            "repeated bare requests offered to the worker that has them",
            lambda: forwarding.attached_total,
        ),
        ("carried_requests_total", "bare requests taken over from draining workers", lambda: forwarding.carried_total),
        (
            "overloaded_requests_total",
            "requests refused because they would have had to wait for too long",
            lambda: decider.turned_away.refused_total,
        ),
        (
            "late_requests_total",
            "requests not decided because nobody would have waited for the answer",
            lambda: desk.late_total,
        ),
        (
            "stood_back_total",
            "times it took no more requests until it had decided most of those that it had",
            lambda: desk.stood_back_total,
        ),
        (
            "phantom_requests_total",
            "requests that no longer count, as their tenant has too many placed that no worker has accepted",
            lambda: core.bookings.phantoms_total,
        ),
        ("internal_errors_total", "faults of ours", lambda: loop.internal_errors_total),
        ("booked_requests", "requests booked at workers", lambda: len(core.bookings)),
        (
            "running_requests",
            "booked requests that a worker accepted and that have not ended",
            lambda: core.bookings.running,
        ),
        ("promised_requests", "requests whose blocks are expected where they were placed", lambda: len(core.inflight)),
        ("ledger_decisions", "decisions that can be explained", lambda: len(core.ledger)),
        ("decision_seconds_total", "own time of decisions", lambda: desk.decision_seconds_total),
        ("malformed_messages_total", "messages refused as wrong", lambda: loop.malformed_total),
        ("unsent_messages_total", "messages NATS did not take", lambda: loop.unsent_total),
        ("prompt_tokens_total", "prompt tokens of started requests", lambda: hits.prompt_total),
        ("attained_hit_tokens_total", "of them, those found in a cache", lambda: hits.attained_total),
        ("attainable_hit_tokens_total", "of them, those that some candidate had cached", lambda: hits.attainable_total),
        ("lost_hit_tokens_total", "attainable and not attained, request by request", lambda: hits.lost_total),
        ("referred_requests_total", "requests that were told to ask another region", lambda: regions.referred_total),
        (
            "hinted_requests_total",
            "requests that were told of a region that may have more of their prompt",
            lambda: regions.hinted_total,
        ),
        ("known_regions", "other regions that can be counted on", lambda: regions.regions.fresh_count),
    ]


def _of_blocks(loop: PlacementLoop) -> list[tuple[str, str, Callable[[], float]]]:
    subscriptions, indexer = loop.subscriptions, loop.core.indexer
    index = indexer.index
    return [
        ("index_blocks", "blocks known to be held by somebody", lambda: len(index)),
        ("index_capacity_blocks", "most blocks it can know", lambda: index.max_blocks),
        ("index_bytes", "memory of the index", lambda: index.nbytes),
        (
            "index_given_up_blocks_total",
            "blocks left out, or taken out, for want of room",
            lambda: index.given_up_total,
        ),
        ("index_left_out_workers_total", "workers not followed for want of room", lambda: indexer.left_out_total),
        ("followed_vaults", "vaults whose blocks are known", lambda: indexer.vaults()[0]),
        ("vault_blocks", "blocks in them; one that several have counts for each", lambda: indexer.vaults()[1]),
        (
            "pulled_snapshots_total",
            "snapshots asked of workers and vaults",
            lambda: loop.executor.snapshots_asked_total,
        ),
        ("malformed_events_total", "block events that were unreadable", lambda: subscriptions.malformed_events_total),
        (
            "unknown_events_total",
            "block events of workers, or lives, that are no members",
            lambda: indexer.unknown_total,
        ),
    ]


def _per_worker(
    core: PlacementCore, of: Callable[[str], Shown], rows: Iterable[tuple[str, str, Callable[[Shown], float]]]
) -> Iterable[Reading]:
    for name, help_, value in rows:

        def read(value: Callable[[Shown], float] = value) -> Labelled:
            return {(worker,): value(of(worker)) for worker in list(core.fleet.workers)}

        yield Reading(name, help_, labels=PER_WORKER, read_labelled=read)


def _of_load(core: PlacementCore) -> Iterable[Reading]:
    rows: list[tuple[str, str, Callable[[WorkerMetrics], float]]] = [
        ("kvfleet_request_active_slots", "slots with a request", lambda one: one.request_active_slots),
        ("kvfleet_request_total_slots", "most requests at once", lambda one: one.request_total_slots),
        ("kvfleet_kv_active_blocks", "KV blocks of running requests", lambda one: one.kv_active_blocks),
        ("kvfleet_kv_total_blocks", "KV blocks", lambda one: one.kv_total_blocks),
        ("kvfleet_waiting_requests", "requests without a slot", lambda one: one.num_requests_waiting),
        ("kvfleet_gpu_cache_usage_ratio", "KV blocks in use, of all", lambda one: one.gpu_cache_usage_perc),
        (
            "kvfleet_gpu_prefix_cache_hit_ratio",
            "prompt tokens of the last minute found cached, of all",
            lambda one: one.gpu_prefix_cache_hit_rate,
        ),
    ]
    return _per_worker(core, core.metrics.of, rows)


def _of_feedback(core: PlacementCore) -> Iterable[Reading]:
    """What the index said of a worker against what its requests found."""
    none = Experience()
    rows: list[tuple[str, str, Callable[[Experience], float]]] = [
        (
            f"{PREFIX}predicted_hit_tokens_total",
            "tokens that the index said requests would find",
            lambda one: one.predicted_tokens_total,
        ),
        (
            f"{PREFIX}missing_hit_tokens_total",
            "of them, those that were not there",
            lambda one: one.missing_tokens_total,
        ),
        (
            f"{PREFIX}unpredicted_hit_tokens_total",
            "tokens found there that the index had not said: predicted minus actual is missing minus these",
            lambda one: one.unpredicted_tokens_total,
        ),
    ]

    def beliefs() -> Labelled:
        now = {worker: core.feedback.belief(worker) for worker in list(core.fleet.workers)}
        return {(worker, each.value): float(each is held) for worker, held in now.items() for each in Belief}

    yield from _per_worker(core, lambda worker: core.feedback.of.get(worker, none), rows)
    yield Reading(
        f"{PREFIX}belief",
        "1 for how far a worker's index is believed now",
        labels=(*PER_WORKER, "belief"),
        read_labelled=beliefs,
    )


def _of_models(core: PlacementCore) -> Iterable[Reading]:
    """The autoscaling signals."""
    rows: list[tuple[str, str, Callable[[ModelSignals], float]]] = [
        (
            "kvfleet_model_queue_depth_requests",
            "requests that wait at workers, are on their way there, or were refused just now",
            lambda one: one.queue_depth,
        ),
        (
            "kvfleet_model_oldest_wait_seconds",
            "how long the oldest of those that wait has waited",
            lambda one: one.oldest_wait_s,
        ),
        (
            "kvfleet_model_saturation_ratio",
            "work to be done, of what the model's ready workers can do within the TTFT target",
            lambda one: one.saturation,
        ),
        ("kvfleet_model_desired_replicas", "workers that the model should have", lambda one: one.desired),
        ("kvfleet_model_ready_replicas", "workers of the model that take work", lambda one: one.ready),
    ]
    for name, help_, value in rows:

        def read(value: Callable[[ModelSignals], float] = value) -> Labelled:
            return {(one.model,): value(one) for one in core.autoscaler.signals()}

        yield Reading(name, help_, labels=PER_MODEL, read_labelled=read)

    def parts() -> Labelled:
        return {(one.model, part): one.parts.get(part, 0.0) for one in core.autoscaler.signals() for part in PARTS}

    yield Reading(
        "kvfleet_model_needed_replicas",
        "workers that would just be busy, by what is to be done; the largest part counts",
        labels=("model", "part"),
        read_labelled=parts,
    )
