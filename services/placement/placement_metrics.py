"""What a placement replica shows to Prometheus: readings of what its core keeps anyway.

The core's own names of a worker's load, those of NVIDIA Dynamo, end in units here:

    request_active_slots, request_total_slots   kvfleet_request_active_slots, kvfleet_request_total_slots
    kv_active_blocks, kv_total_blocks           kvfleet_kv_active_blocks, kvfleet_kv_total_blocks
    num_requests_waiting                        kvfleet_waiting_requests
    gpu_cache_usage_perc                        kvfleet_gpu_cache_usage_ratio
    gpu_prefix_cache_hit_rate                   kvfleet_gpu_prefix_cache_hit_ratio

A scrape runs on a thread beside the loop: it copies what it goes through, and values may be a moment apart. Series of
a worker exist from its joining on, at 0, and end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvfleet.placement.advice.autoscale_metrics import autoscale_readings
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.record.metrics_aggregator import WorkerMetrics
from kvfleet.placement.workers.feedback import Belief, Experience
from kvproto.connection import Connection
from kvservice.metrics import Reading
from kvservice.process_metrics import common_readings

PER_WORKER = ("worker",)

Labelled = Mapping[tuple[str, ...], float]


def readings(
    loop: PlacementLoop, connection: Connection, certificates: Mapping[str, str | Path | None] = {}
) -> list[Reading]:
    return [
        *_of_the_loop(loop),
        *_of_hits(loop.core),
        *_of_regions(loop.core),
        *_of_the_index(loop),
        *_of_load(loop.core),
        *_of_feedback(loop.core),
        *common_readings("placement", connection, certificates),
        *autoscale_readings(loop.core.autoscaler),
    ]


def _of_the_loop(loop: PlacementLoop) -> list[Reading]:
    core = loop.core
    return [
        Reading("kvfleet_placement_decisions_total", "requests placed", lambda: core.decider.decisions_total),
        Reading(
            "kvfleet_placement_sourced_decisions_total",
            "requests placed with the name of a worker to pull from",
            lambda: core.decider.sourced_total,
        ),
        Reading(
            "kvfleet_placement_preload_answers_total",
            "new workers told what to preload",
            lambda: loop.question_desk.preload_answers_total,
        ),
        Reading(
            "kvfleet_placement_unplaced_requests_total",
            "requests nobody could serve",
            lambda: core.decider.no_worker_total,
        ),
        Reading(
            "kvfleet_placement_forwarded_requests_total",
            "bare requests a worker accepted",
            lambda: core.forwarding.forwarded_total,
        ),
        Reading(
            "kvfleet_placement_producer_failures_total",
            "terminal failures sent to bare producers",
            lambda: core.forwarding.producer_failures_total,
        ),
        Reading(
            "kvfleet_placement_lost_requests_total",
            "bare requests whose worker was lost after it accepted",
            lambda: core.in_flight.accepted.lost_total,
        ),
        Reading(
            "kvfleet_placement_undrained_workers_total",
            "workers that went without having drained: killed, crashed, or cut off",
            lambda: core.undrained_total,
        ),
        Reading(
            "kvfleet_placement_retried_offers_total",
            "offers made to a further worker",
            lambda: core.forwarding.retried_offers_total,
        ),
        Reading(
            "kvfleet_placement_late_acceptances_total",
            "acceptances by workers that had been given up on",
            lambda: core.forwarding.late_acceptances_total,
        ),
        Reading(
            "kvfleet_placement_attached_requests_total",
            "repeated bare requests offered to the worker that has them",
            lambda: core.forwarding.attached_total,
        ),
        Reading(
            "kvfleet_placement_carried_requests_total",
            "bare requests taken over from draining workers",
            lambda: core.forwarding.carried_total,
        ),
        Reading(
            "kvfleet_placement_overloaded_requests_total",
            "requests refused because they would have had to wait for too long",
            lambda: core.decider.turned_away.refused_total,
        ),
        Reading(
            "kvfleet_placement_late_requests_total",
            "requests not decided because nobody would have waited for the answer",
            lambda: loop.desk.late_total,
        ),
        Reading(
            "kvfleet_placement_stood_back_total",
            "times it took no more requests until it had decided most of those that it had",
            lambda: loop.desk.stood_back_total,
        ),
        Reading(
            "kvfleet_placement_phantom_requests_total",
            "requests that no longer count, as their tenant has too many placed that no worker has accepted",
            lambda: core.bookings.phantoms_total,
        ),
        Reading("kvfleet_placement_internal_errors_total", "faults of ours", lambda: loop.internal_errors_total),
        Reading("kvfleet_placement_booked_requests", "requests booked at workers", lambda: len(core.bookings)),
        Reading(
            "kvfleet_placement_running_requests",
            "booked requests that a worker accepted and that have not ended",
            lambda: core.bookings.running,
        ),
        Reading(
            "kvfleet_placement_promised_requests",
            "requests whose blocks are expected where they were placed",
            lambda: len(core.inflight),
        ),
        Reading("kvfleet_placement_ledger_decisions", "decisions that can be explained", lambda: len(core.ledger)),
        Reading(
            "kvfleet_placement_decision_seconds_total",
            "own time of decisions",
            lambda: loop.desk.decision_seconds_total,
        ),
        Reading(
            "kvfleet_placement_malformed_messages_total", "messages refused as wrong", lambda: loop.malformed_total
        ),
        Reading("kvfleet_placement_unsent_messages_total", "messages NATS did not take", lambda: loop.unsent_total),
    ]


def _of_hits(core: PlacementCore) -> list[Reading]:
    """Attained and lost add up to attainable: what is lost is lost by placing, what is not attainable is cold."""
    hits = core.ledger.hits
    return [
        Reading(
            "kvfleet_placement_prompt_tokens_total", "prompt tokens of started requests", lambda: hits.prompt_total
        ),
        Reading(
            "kvfleet_placement_attained_hit_tokens_total",
            "of them, those found in a cache",
            lambda: hits.attained_total,
        ),
        Reading(
            "kvfleet_placement_attainable_hit_tokens_total",
            "of them, those that some candidate had cached",
            lambda: hits.attainable_total,
        ),
        Reading(
            "kvfleet_placement_lost_hit_tokens_total",
            "attainable and not attained, request by request",
            lambda: hits.lost_total,
        ),
    ]


def _of_regions(core: PlacementCore) -> list[Reading]:
    region_summaries = core.region_summaries
    return [
        Reading(
            "kvfleet_placement_referred_requests_total",
            "requests that were told to ask another region",
            lambda: region_summaries.referred_total,
        ),
        Reading(
            "kvfleet_placement_hinted_requests_total",
            "requests that were told of a region that may have more of their prompt",
            lambda: region_summaries.hinted_total,
        ),
        Reading(
            "kvfleet_placement_known_regions",
            "other regions that can be counted on",
            lambda: region_summaries.regions.fresh_count,
        ),
    ]


def _of_the_index(loop: PlacementLoop) -> list[Reading]:
    core, subscriptions = loop.core, loop.subscriptions
    indexer = core.indexer
    index = indexer.index
    return [
        Reading("kvfleet_placement_index_blocks", "blocks known to be held by somebody", lambda: len(index)),
        Reading("kvfleet_placement_index_capacity_blocks", "most blocks it can know", lambda: index.max_blocks),
        Reading("kvfleet_placement_index_bytes", "memory of the index", lambda: index.nbytes),
        Reading(
            "kvfleet_placement_index_given_up_blocks_total",
            "blocks left out, or taken out, for want of room",
            lambda: index.given_up_total,
        ),
        Reading(
            "kvfleet_placement_index_left_out_workers_total",
            "workers not followed for want of room",
            lambda: indexer.left_out_total,
        ),
        Reading("kvfleet_placement_followed_vaults", "vaults whose blocks are known", lambda: indexer.vaults()[0]),
        Reading(
            "kvfleet_placement_vault_blocks",
            "blocks in them; one that several have counts for each",
            lambda: indexer.vaults()[1],
        ),
        Reading(
            "kvfleet_placement_pulled_snapshots_total",
            "snapshots asked of workers and vaults",
            lambda: subscriptions.snapshots_asked_total,
        ),
        Reading(
            "kvfleet_placement_malformed_events_total",
            "block events that were unreadable",
            lambda: subscriptions.malformed_events_total + indexer.malformed_total,
        ),
        Reading(
            "kvfleet_placement_unknown_events_total",
            "block events of workers, or lives, that are no members",
            lambda: indexer.unknown_total,
        ),
        Reading(
            "kvfleet_placement_followed_workers",
            "workers by how exactly their blocks are known",
            labels=("state",),
            read_labelled=lambda: {(state.value,): count for state, count in core.followers().items()},
        ),
    ]


def _of_load(core: PlacementCore) -> list[Reading]:
    def of(name: str, help_: str, value: Callable[[WorkerMetrics], float]) -> Reading:
        def read() -> Labelled:
            return {(worker,): value(core.metrics.of(worker)) for worker in list(core.fleet.workers)}

        return Reading(name, help_, labels=PER_WORKER, read_labelled=read)

    return [
        of("kvfleet_request_active_slots", "slots with a request", lambda one: one.request_active_slots),
        of("kvfleet_request_total_slots", "most requests at once", lambda one: one.request_total_slots),
        of("kvfleet_kv_active_blocks", "KV blocks of running requests", lambda one: one.kv_active_blocks),
        of("kvfleet_kv_total_blocks", "KV blocks", lambda one: one.kv_total_blocks),
        of("kvfleet_waiting_requests", "requests without a slot", lambda one: one.num_requests_waiting),
        of("kvfleet_gpu_cache_usage_ratio", "KV blocks in use, of all", lambda one: one.gpu_cache_usage_perc),
        of(
            "kvfleet_gpu_prefix_cache_hit_ratio",
            "prompt tokens of the last minute found cached, of all",
            lambda one: one.gpu_prefix_cache_hit_rate,
        ),
    ]


def _of_feedback(core: PlacementCore) -> list[Reading]:
    """What the index said of a worker against what its requests found."""
    none = Experience()

    def of(name: str, help_: str, value: Callable[[Experience], float]) -> Reading:
        def read() -> Labelled:
            return {(worker,): value(core.feedback.of.get(worker, none)) for worker in list(core.fleet.workers)}

        return Reading(name, help_, labels=PER_WORKER, read_labelled=read)

    def beliefs() -> Labelled:
        now = {worker: core.feedback.belief(worker) for worker in list(core.fleet.workers)}
        return {(worker, each.value): float(each is held) for worker, held in now.items() for each in Belief}

    return [
        of(
            "kvfleet_placement_predicted_hit_tokens_total",
            "tokens that the index said requests would find",
            lambda one: one.predicted_tokens_total,
        ),
        of(
            "kvfleet_placement_missing_hit_tokens_total",
            "of them, those that were not there",
            lambda one: one.missing_tokens_total,
        ),
        of(
            "kvfleet_placement_unpredicted_hit_tokens_total",
            "tokens found there that the index had not said: predicted minus actual is missing minus these",
            lambda one: one.unpredicted_tokens_total,
        ),
        Reading(
            "kvfleet_placement_belief",
            "1 for how far a worker's index is believed now",
            labels=(*PER_WORKER, "belief"),
            read_labelled=beliefs,
        ),
    ]
