"""What a vault shows to Prometheus: readings of counters that the store and the data plane keep anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.loop import VaultLoop
from kvproto.connection import Connection
from kvproto.dataplane.server import DataPlaneCounters
from kvservice.data_plane import HANDSHAKE_REFUSALS
from kvservice.metrics import LabelledReader, Reading
from kvservice.process_metrics import common_readings

# Metrics, behind `kvfleet_vault_`, with their help, and the counter that they show.
_STORE = (
    ("stored_blocks_total", "blocks taken in", "stored_total"),
    ("stored_bytes_total", "their bytes", "stored_bytes_total"),
    ("replaced_blocks_total", "lossy blocks that gave way to exact ones", "replaced_total"),
    ("abandoned_blocks_total", "blocks whose bytes did not come, or came wrong", "abandoned_total"),
    ("hit_blocks_total", "blocks asked for and sent", "hits_total"),
    ("hit_bytes_total", "their bytes", "hit_bytes_total"),
    ("disk_hit_blocks_total", "of the blocks sent, those read from disk", "disk_hits_total"),
    ("damaged_blocks_total", "blocks whose bytes memory did not keep", "damaged_total"),
    ("erased_blocks_total", "blocks forgotten on request", "erased_total"),
    ("evicted_blocks_total", "blocks evicted from memory", "evictions_total"),
    ("dropped_blocks_total", "of those, the ones that the disk was too slow for", "dropped_total"),
    ("spilled_blocks_total", "blocks written to disk", "spilled_total"),
    ("disk_evicted_blocks_total", "blocks that the disk gave up for others", "disk_evictions_total"),
)
_DATA_PLANE = (
    ("open_connections", "authenticated data-plane connections", "open_connections"),
    ("connections_total", "data-plane connections authenticated", "connections"),
    ("received_bytes_total", "over the data plane", "bytes_in"),
    ("sent_bytes_total", "over the data plane", "bytes_out"),
    ("checksum_failures_total", "blocks that arrived damaged", "checksum_failures"),
    ("malformed_connections_total", "connections ended for what came over them", "malformed"),
    ("timed_out_connections_total", "connections ended in the middle of a request", "timeouts"),
    ("store_failures_total", "requests that failed in the store: faults of ours", "store_failures"),
)


def readings(
    vault: VaultLoop,
    connection: Connection,
    disk: DiskThread | None,
    certificates: Mapping[str, str | Path | None] = {},
) -> list[Reading]:
    table, memory, counters, server = vault.store.table, vault.store.table.memory, vault.store.counters, vault.server

    def of_store(field: str) -> Callable[[], float]:
        return lambda: float(getattr(counters, field))

    def of_data_plane(field: str) -> Callable[[], float]:
        return lambda: float(getattr(server.counters, field))

    assert all(field in DataPlaneCounters.__slots__ for _, _, field in _DATA_PLANE)
    rows: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("used_bytes", "memory of blocks and of what belongs to them", lambda: memory.used_bytes),
        ("capacity_bytes", "most memory it takes", lambda: memory.max_bytes),
        ("free_buffer_bytes", "of the memory used, buffers that wait for the next block", lambda: memory.free_bytes),
        ("memory_blocks", "blocks in memory", lambda: len(table.resident)),
        ("disk_blocks", "blocks on disk", lambda: len(table.on_disk)),
        ("held_blocks", "blocks in memory or on disk", lambda: table.held_blocks),
        *((name, text, of_store(field)) for name, text, field in _STORE),
        *((name, text, of_data_plane(field)) for name, text, field in _DATA_PLANE),
        ("disk_used_bytes", "of the files", lambda: disk.used_bytes if disk else 0),
        ("disk_capacity_bytes", "most bytes of files", lambda: disk.disk.max_bytes if disk else 0),
        (
            "disk_damaged_blocks_total",
            "blocks that the disk did not keep",
            lambda: disk.disk.counts.damaged if disk else 0,
        ),
        (
            "disk_failures_total",
            "writes and erasures that the disk refused",
            lambda: disk.failures_total if disk else 0,
        ),
        ("events_total", "block events told", lambda: vault.log.seq),
        ("snapshots_total", "snapshots sent", lambda: vault.snapshots_total),
        ("malformed_messages_total", "messages that could not be read", lambda: vault.malformed_total),
        ("unsent_messages_total", "messages NATS did not take", lambda: vault.unsent_total),
    )
    refused = "data-plane connections that were not let in"
    by_reason: tuple[tuple[str, str, Callable[[], Mapping[str, int]]], ...] = (
        ("missed_blocks_total", "blocks asked for and not sent", lambda: counters.misses),
        ("refused_blocks_total", "blocks offered and not taken in", lambda: counters.refused),
        (
            "refused_handshakes_total",
            refused,
            lambda: dict.fromkeys(HANDSHAKE_REFUSALS, 0) | dict(server.counters.refused),
        ),
    )

    def labelled(read: Callable[[], Mapping[str, int]]) -> LabelledReader:
        return lambda: {(reason,): float(count) for reason, count in read().items()}

    return [
        *(Reading(f"kvfleet_vault_{name}", text, read) for name, text, read in rows),
        *(
            Reading(f"kvfleet_vault_{name}", text, labels=("reason",), read_labelled=labelled(read))
            for name, text, read in by_reason
        ),
        *common_readings("vault", connection, certificates),
    ]
