"""A vault's metrics: readings of counters of the store, the disk and the data plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.loop import VaultLoop
from kvproto.connection import Connection
from kvservice.data_plane import HANDSHAKE_REFUSALS
from kvservice.metrics import Reader, Reading, common_readings

# Metrics, behind `kvfleet_vault_`, their help, and the counter that they show, as a path from the loop or the disk.
_VAULT = (
    ("used_bytes", "memory of blocks and of what belongs to them", "store.table.memory.used_bytes"),
    ("capacity_bytes", "most memory it takes", "store.table.memory.max_bytes"),
    ("free_buffer_bytes", "of the memory used, buffers that wait for the next block", "store.table.memory.free_bytes"),
    ("held_blocks", "blocks in memory or on disk", "store.table.held_blocks"),
    ("stored_blocks_total", "blocks taken in", "store.counters.stored_total"),
    ("stored_bytes_total", "their bytes", "store.counters.stored_bytes_total"),
    ("replaced_blocks_total", "lossy blocks that gave way to exact ones", "store.counters.replaced_total"),
    ("abandoned_blocks_total", "blocks whose bytes did not come, or came wrong", "store.counters.abandoned_total"),
    ("hit_blocks_total", "blocks asked for and sent", "store.counters.hits_total"),
    ("hit_bytes_total", "their bytes", "store.counters.hit_bytes_total"),
    ("disk_hit_blocks_total", "of the blocks sent, those read from disk", "store.counters.disk_hits_total"),
    ("damaged_blocks_total", "blocks whose bytes memory did not keep", "store.counters.damaged_total"),
    ("erased_blocks_total", "blocks forgotten on request", "store.counters.erased_total"),
    ("evicted_blocks_total", "blocks evicted from memory", "store.counters.evictions_total"),
    ("dropped_blocks_total", "of those, the ones that the disk was too slow for", "store.counters.dropped_total"),
    ("spilled_blocks_total", "blocks written to disk", "store.counters.spilled_total"),
    ("disk_evicted_blocks_total", "blocks that the disk gave up for others", "store.counters.disk_evictions_total"),
    ("open_connections", "authenticated data-plane connections", "server.counters.open_connections"),
    ("connections_total", "data-plane connections authenticated", "server.counters.connections"),
    ("received_bytes_total", "over the data plane", "server.counters.bytes_in"),
    ("sent_bytes_total", "over the data plane", "server.counters.bytes_out"),
    ("checksum_failures_total", "blocks that arrived damaged", "server.counters.checksum_failures"),
    ("malformed_connections_total", "connections ended for what came over them", "server.counters.malformed"),
    ("timed_out_connections_total", "connections ended in the middle of a request", "server.counters.timeouts"),
    ("store_failures_total", "requests that failed in the store: faults of ours", "server.counters.store_failures"),
    ("events_total", "block events told", "log.seq"),
    ("snapshots_total", "snapshots sent", "snapshots_total"),
    ("malformed_messages_total", "messages that could not be read", "malformed_total"),
    ("unsent_messages_total", "messages NATS did not take", "unsent_total"),
)
# The same of the pool of hybrid models' recurrent states, from its store.
_STATES = (
    ("state_used_bytes", "memory of recurrent states and of what belongs to them", "table.memory.used_bytes"),
    ("state_capacity_bytes", "most memory they take", "table.memory.max_bytes"),
    ("held_states", "states in memory or on disk", "table.held_blocks"),
    ("stored_states_total", "states taken in", "counters.stored_total"),
    ("hit_states_total", "states asked for and sent", "counters.hits_total"),
    ("damaged_states_total", "states whose bytes memory did not keep", "counters.damaged_total"),
    ("erased_states_total", "states forgotten on request", "counters.erased_total"),
    ("evicted_states_total", "states evicted from memory", "counters.evictions_total"),
)
_DISK = (
    ("disk_used_bytes", "of the files", "used_bytes"),
    ("disk_capacity_bytes", "most bytes of files", "disk.max_bytes"),
    ("disk_damaged_blocks_total", "blocks that the disk did not keep", "disk.counts.damaged"),
    ("disk_failures_total", "writes and erasures that the disk refused", "failures_total"),
)


def readings(
    vault: VaultLoop,
    connection: Connection,
    disk: DiskThread | None,
    certificates: Mapping[str, str | Path | None] = {},
) -> list[Reading]:
    table, counters, server = vault.store.table, vault.store.counters, vault.server

    def plain(name: str, text: str, read: Reader) -> Reading:
        return Reading(f"kvfleet_vault_{name}", text, read)

    def path(root: object, field: str) -> Reader:
        value = attrgetter(field)
        return lambda: float(value(root)) if root is not None else 0.0

    def by_reason(name: str, text: str, read: Callable[[], Mapping[str, int]]) -> Reading:
        def labelled() -> Mapping[tuple[str, ...], float]:
            return {(reason,): float(count) for reason, count in read().items()}

        return Reading(f"kvfleet_vault_{name}", text, labels=("reason",), read_labelled=labelled)

    def refused_handshakes() -> Mapping[str, int]:
        return dict.fromkeys(HANDSHAKE_REFUSALS, 0) | dict(server.counters.refused)

    return [
        *(plain(name, text, path(vault, field)) for name, text, field in _VAULT),
        *(plain(name, text, path(vault.states, field)) for name, text, field in _STATES),
        *(plain(name, text, path(disk, field)) for name, text, field in _DISK),
        plain("memory_blocks", "blocks in memory", lambda: len(table.resident)),
        plain("disk_blocks", "blocks on disk", lambda: len(table.on_disk)),
        by_reason("missed_blocks_total", "blocks asked for and not sent", lambda: counters.misses),
        by_reason("refused_blocks_total", "blocks offered and not taken in", lambda: counters.refused),
        by_reason("refused_handshakes_total", "data-plane connections that were not let in", refused_handshakes),
        *common_readings("vault", connection, certificates),
    ]
