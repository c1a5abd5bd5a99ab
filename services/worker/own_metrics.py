"""What a worker with the own engine shows to Prometheus beside `worker_metrics`."""

from __future__ import annotations

from collections.abc import Callable

from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.model.device_watch import DeviceWatch
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.transfers import RemoteCounts
from kvfleet.worker.worker_metrics import labelled, plain, reading
from kvproto.dataplane.server import DataPlaneCounters
from kvproto.messages import Tier
from kvservice.data_plane import HANDSHAKE_REFUSALS
from kvservice.metrics import LabelledReader, Reading

_PROTECTED = (
    (
        "protected_blocks_total",
        "blocks of running sequences given to vaults so that a crash costs less",
        "protected_blocks_total",
    ),
)
_EVICTION = (
    (
        "eviction_saved_seconds_total",
        "computing prompts that `--eviction reuse` saved, as least recently used blocks first would have cost it",
        "balance.saved_s",
    ),
    ("eviction_lost_seconds_total", "computing prompts that it cost where that order would not have", "balance.lost_s"),
    ("eviction_follows_lru", "1 while the least recently used block goes first, else 0", "balance.follows_lru"),
)
_PAUSES = (
    ("paused_conversations", "conversations that are expected back", "paused"),
    ("brought_blocks_total", "blocks restored while their conversations paused", "brought_blocks_total"),
    (
        "given_back_blocks_total",
        "of them, those whose conversations did not come back in time",
        "given_back_blocks_total",
    ),
    ("saved_restore_seconds_total", "restoring that turns which came back did not wait for", "saved_s_total"),
)
_QUANTISED = (
    ("quantised_blocks_total", "such blocks", "snr_db.count"),
    ("quantised_raw_bytes_total", "their bytes before", "quantised_raw_bytes"),
    ("quantised_bytes_total", "their bytes after", "quantised_bytes"),
    (
        "kept_raw_blocks_total",
        "blocks that were to be quantised and would have been below the gate of signal to noise",
        "kept_raw",
    ),
)


def _transfer_readings(
    engine: EngineThread, remote: RemoteTiers | None, served: Callable[[], DataPlaneCounters]
) -> list[Reading]:
    def moved() -> dict[tuple[str, ...], float]:
        found = {Tier.HOST: engine.copied_bytes()}
        found |= remote.counts.transfers() if remote is not None else {Tier.VAULT: (0, 0), Tier.PEER: (0, 0)}
        to_peers = served()
        came, went = found[Tier.PEER]
        found[Tier.PEER] = came + to_peers.bytes_in, went + to_peers.bytes_out
        return {
            (tier.value, direction): float(count)
            for tier, both in found.items()
            for direction, count in zip(("in", "out"), both, strict=True)
        }

    def refused() -> dict[tuple[str, ...], float]:
        counts = dict.fromkeys(HANDSHAKE_REFUSALS, 0) | dict(served().refused)
        return {(reason,): float(count) for reason, count in counts.items()}

    text = "bytes between device and host, or over the data plane; in: to this worker, or up to its device"
    return [
        labelled("transfer_bytes_total", ("tier", "direction"), text, moved),
        labelled("refused_handshakes_total", ("reason",), "data-plane connections that were not let in", refused),
    ]


def _device_readings(worker: WorkerLoop, watch: DeviceWatch) -> list[Reading]:
    record, device = worker.record, (watch.device,)

    def utilisation() -> dict[tuple[str, ...], float]:
        share = watch.utilisation()
        return {} if share is None else {device: share}

    def memory(which: int) -> LabelledReader:
        return lambda: {device: float(watch.memory()[which])}

    which_worker = "1; its labels say which worker this is, to be joined on the instance"
    used = "memory in use: of a GPU by all, on the CPU by this process"
    total = "memory that there is: the GPU's, or the host's or cgroup's"
    busy = "share of the last moment in which something ran on the GPU; of GPUs with NVML alone"
    return [
        labelled(
            "info", ("worker", "model", "device"), which_worker, lambda: {(record.id, record.model, *device): 1.0}
        ),
        labelled("device_memory_used_bytes", ("device",), used, memory(0)),
        labelled("device_memory_bytes", ("device",), total, memory(1)),
        labelled("device_utilisation_ratio", ("device",), busy, utilisation),
    ]


def own_readings(
    worker: WorkerLoop,
    engine: EngineThread,
    watch: DeviceWatch,
    remote: RemoteTiers | None = None,
    served: Callable[[], DataPlaneCounters] = DataPlaneCounters,
) -> list[Reading]:
    """`served`: transfers that peers asked for."""
    quantised = remote.counts if remote is not None else RemoteCounts()
    noise = "signal to noise of blocks that were quantised for a vault"
    return [
        *_transfer_readings(engine, remote, served),
        *_device_readings(worker, watch),
        *plain(_PROTECTED, lambda: engine),
        *plain(_EVICTION, lambda: engine),
        *plain(_PAUSES, lambda: worker.heartbeat().load),
        *plain(_QUANTISED, lambda: quantised),
        reading("quantised_snr_decibels", noise, read_histogram=quantised.snr_db.read),
    ]
