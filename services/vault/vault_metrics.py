"""What a vault shows to Prometheus: readings of counters that the store and the data plane keep anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.loop import VaultLoop
from kvproto.connection import Connection
from kvproto.dataplane.server import DataPlaneCounters
from kvservice.data_plane import HANDSHAKE_REFUSALS
from kvservice.metrics import Reading
from kvservice.process_metrics import common_readings

REASON = ("reason",)

_STORE = (
    ("kvfleet_vault_stored_blocks_total", "blocks taken in", "stored_total"),
    ("kvfleet_vault_stored_bytes_total", "their bytes", "stored_bytes_total"),
    ("kvfleet_vault_replaced_blocks_total", "lossy blocks that gave way to exact ones", "replaced_total"),
    ("kvfleet_vault_abandoned_blocks_total", "blocks whose bytes did not come, or came wrong", "abandoned_total"),
    ("kvfleet_vault_hit_blocks_total", "blocks asked for and sent", "hits_total"),
    ("kvfleet_vault_hit_bytes_total", "their bytes", "hit_bytes_total"),
    ("kvfleet_vault_disk_hit_blocks_total", "of the blocks sent, those read from disk", "disk_hits_total"),
    ("kvfleet_vault_damaged_blocks_total", "blocks whose bytes memory did not keep", "damaged_total"),
    ("kvfleet_vault_erased_blocks_total", "blocks forgotten on request", "erased_total"),
    ("kvfleet_vault_evicted_blocks_total", "blocks evicted from memory", "evictions_total"),
    ("kvfleet_vault_dropped_blocks_total", "of those, the ones that the disk was too slow for", "dropped_total"),
    ("kvfleet_vault_spilled_blocks_total", "blocks written to disk", "spilled_total"),
    ("kvfleet_vault_disk_evicted_blocks_total", "blocks that the disk gave up for others", "disk_evictions_total"),
)

_DATA_PLANE = (
    ("kvfleet_vault_open_connections", "authenticated data-plane connections", "open_connections"),
    ("kvfleet_vault_connections_total", "data-plane connections authenticated", "connections"),
    ("kvfleet_vault_received_bytes_total", "over the data plane", "bytes_in"),
    ("kvfleet_vault_sent_bytes_total", "over the data plane", "bytes_out"),
    ("kvfleet_vault_checksum_failures_total", "blocks that arrived damaged", "checksum_failures"),
    ("kvfleet_vault_malformed_connections_total", "connections ended for what came over them", "malformed"),
    ("kvfleet_vault_timed_out_connections_total", "connections ended in the middle of a request", "timeouts"),
    ("kvfleet_vault_store_failures_total", "requests that failed in the store: faults of ours", "store_failures"),
)


def readings(
    vault: VaultLoop,
    connection: Connection,
    disk: DiskThread | None,
    certificates: Mapping[str, str | Path | None] = {},
) -> list[Reading]:
    store, server = vault.store, vault.server

    def of_store(field: str) -> Callable[[], float]:
        return lambda: float(getattr(store.counters, field))

    def of_data_plane(field: str) -> Callable[[], float]:
        return lambda: float(getattr(server.counters, field))

    assert all(field in DataPlaneCounters.__slots__ for _, _, field in _DATA_PLANE)
    return [
        Reading("kvfleet_vault_used_bytes", "memory of blocks and of what belongs to them", lambda: store.used_bytes),
        Reading("kvfleet_vault_capacity_bytes", "most memory it takes", lambda: store.max_bytes),
        Reading(
            "kvfleet_vault_free_buffer_bytes",
            "of the memory used, buffers that wait for the next block",
            lambda: store.free_buffer_bytes,
        ),
        Reading("kvfleet_vault_memory_blocks", "blocks in memory", lambda: store.blocks),
        Reading("kvfleet_vault_disk_blocks", "blocks on disk", lambda: store.disk_blocks),
        Reading("kvfleet_vault_held_blocks", "blocks in memory or on disk", lambda: store.held_blocks),
        *(Reading(name, text, of_store(field)) for name, text, field in _STORE),
        Reading(
            "kvfleet_vault_missed_blocks_total",
            "blocks asked for and not sent",
            labels=REASON,
            read_labelled=lambda: by_reason(store.counters.misses),
        ),
        Reading(
            "kvfleet_vault_refused_blocks_total",
            "blocks offered and not taken in",
            labels=REASON,
            read_labelled=lambda: by_reason(store.counters.refused),
        ),
        *(Reading(name, text, of_data_plane(field)) for name, text, field in _DATA_PLANE),
        Reading(
            "kvfleet_vault_refused_handshakes_total",
            "data-plane connections that were not let in",
            labels=REASON,
            read_labelled=lambda: by_reason(dict.fromkeys(HANDSHAKE_REFUSALS, 0) | dict(server.counters.refused)),
        ),
        Reading("kvfleet_vault_disk_used_bytes", "of the files", lambda: disk.used_bytes if disk else 0),
        Reading("kvfleet_vault_disk_capacity_bytes", "most bytes of files", lambda: disk.max_bytes if disk else 0),
        Reading(
            "kvfleet_vault_disk_damaged_blocks_total",
            "blocks that the disk did not keep",
            lambda: disk.counts.damaged if disk else 0,
        ),
        Reading(
            "kvfleet_vault_disk_failures_total",
            "writes and erasures that the disk refused",
            lambda: disk.failures_total if disk else 0,
        ),
        Reading("kvfleet_vault_events_total", "block events told", lambda: vault.log.seq),
        Reading("kvfleet_vault_snapshots_total", "snapshots sent", lambda: vault.snapshots_total),
        Reading(
            "kvfleet_vault_malformed_messages_total", "messages that could not be read", lambda: vault.malformed_total
        ),
        Reading("kvfleet_vault_unsent_messages_total", "messages NATS did not take", lambda: vault.unsent_total),
        *common_readings("vault", connection, certificates),
    ]


def by_reason(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(reason,): float(count) for reason, count in counts.items()}
