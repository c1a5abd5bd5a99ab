"""What a placement replica shows to Prometheus: readings of counters that its core keeps anyway."""

from __future__ import annotations

from kvproto.connection import Connection
from kvservice.metrics import Reading
from services.placement.loop import PlacementLoop


def readings(loop: PlacementLoop, connection: Connection) -> list[Reading]:
    return [
        Reading("kvfleet_placement_decisions_total", "requests placed", lambda: loop.decisions_total),
        Reading("kvfleet_placement_no_worker_total", "requests nobody could serve", lambda: loop.no_worker_total),
        Reading("kvfleet_placement_forwarded_total", "bare requests a worker accepted", lambda: loop.forwarded_total),
        Reading(
            "kvfleet_placement_producer_failures_total",
            "terminal failures sent to bare producers",
            lambda: loop.producer_failures_total,
        ),
        Reading(
            "kvfleet_placement_workers_lost_total",
            "bare requests whose worker was lost after it accepted",
            lambda: loop.core.forwarding.workers_lost_total,
        ),
        Reading(
            "kvfleet_placement_offers_retried_total",
            "offers made to a further worker",
            lambda: loop.core.forwarding.retried_offers_total,
        ),
        Reading(
            "kvfleet_placement_late_acceptances_total",
            "acceptances by workers that had been given up on",
            lambda: loop.core.forwarding.late_acceptances_total,
        ),
        Reading("kvfleet_placement_internal_errors_total", "faults of ours", lambda: loop.internal_errors_total),
        Reading("kvfleet_placement_booked_requests", "requests booked at workers", lambda: loop.booked),
        Reading(
            "kvfleet_placement_decision_seconds_total", "own time of decisions", lambda: loop.decision_seconds_total
        ),
        Reading(
            "kvfleet_placement_messages_malformed_total", "messages refused as wrong", lambda: loop.malformed_total
        ),
        Reading("kvfleet_placement_messages_unsent_total", "messages NATS did not take", lambda: loop.unsent_total),
        Reading("kvfleet_nats_reconnects_total", "reconnects to NATS", lambda: connection.reconnects_total),
    ]
