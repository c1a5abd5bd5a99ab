"""What a worker shows to Prometheus: readings of counters that the loop and the engine keep anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.model.device_watch import DeviceWatch
from kvfleet.worker.schedule.tenant_costs import TenantAccount
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.remote_counts import RemoteCounts
from kvproto.connection import Connection
from kvproto.dataplane.server import DataPlaneCounters
from kvproto.messages import Load, Tier, TierLoad
from kvservice.data_plane import HANDSHAKE_REFUSALS
from kvservice.metrics import LabelledReader, Reading
from kvservice.process_metrics import common_readings

_LOAD = (
    ("kvfleet_worker_waiting_requests", "requests that wait for a slot or for blocks", "waiting"),
    ("kvfleet_worker_running_requests", "sequences that take part in steps", "running"),
    ("kvfleet_worker_used_blocks", "KV blocks that running sequences hold", "blocks_used"),
    ("kvfleet_worker_cached_blocks", "KV blocks with an address in the content index", "blocks_cached"),
    ("kvfleet_worker_blocks", "KV blocks on the device", "blocks_total"),
    ("kvfleet_worker_queued_prefill_tokens", "prompt tokens still to be fed", "queued_prefill_tokens"),
    ("kvfleet_worker_prompt_tokens_total", "prompt tokens of started requests", "prompt_tokens_total"),
    ("kvfleet_worker_hit_tokens_total", "of those, tokens found in the cache", "hit_tokens_total"),
    ("kvfleet_worker_fed_tokens_total", "tokens the model was run on", "fed_tokens_total"),
    ("kvfleet_worker_generated_tokens_total", "tokens generated", "generated_tokens_total"),
    ("kvfleet_worker_preemptions_total", "sequences that gave their blocks to others", "preemptions_total"),
    ("kvfleet_worker_evictions_total", "cached blocks overwritten", "evictions_total"),
)


_TIERS = (Tier.DEVICE.value, Tier.HOST.value, Tier.VAULT.value, Tier.PEER.value)
_TIER_LOAD = (
    ("kvfleet_worker_tier_bytes", "memory that KV blocks take in the tier", "bytes_used"),
    ("kvfleet_worker_tier_capacity_bytes", "memory that KV blocks may take in the tier", "bytes_total"),
    ("kvfleet_worker_tier_blocks", "KV blocks with an address in the tier", "blocks"),
    ("kvfleet_worker_tier_hit_tokens_total", "prompt tokens found in the tier, or brought from it", "hit_tokens_total"),
    ("kvfleet_worker_tier_restores_total", "restores that brought blocks from the tier", "restores_total"),
    ("kvfleet_worker_tier_restored_bytes_total", "bytes restored from the tier", "restored_bytes_total"),
    ("kvfleet_worker_tier_restore_seconds_total", "time that these restores took", "restore_seconds_total"),
    ("kvfleet_worker_tier_offloaded_blocks_total", "blocks written to the tier", "offloaded_blocks_total"),
    ("kvfleet_worker_tier_evictions_total", "blocks of the tier overwritten", "evictions_total"),
)
_FAILURES = (  # others exist once they happen
    "late", "unwanted", "timeout", "gone", "given_up", "checksum", "format", "missing", "wrong", "quarantined",
)  # fmt: skip


_TENANT = (
    ("engine_seconds_total", "seconds of steps, shared by the tokens that each ran on", "engine_seconds"),
    ("prompt_tokens_total", "prompt tokens of started requests", "prompt_tokens"),
    ("cached_tokens_total", "of those, tokens found in a cache", "cached_tokens"),
    ("generated_tokens_total", "tokens generated", "generated_tokens"),
)


def _tier_readings(loads: Callable[[], Mapping[str, TierLoad]]) -> list[Reading]:
    """By tier, and failures by reason too; every worker has all tiers, some of them at 0."""

    def known() -> dict[str, TierLoad]:
        return {tier: TierLoad() for tier in _TIERS} | dict(loads())

    def of_field(field: str) -> LabelledReader:
        return lambda: {(tier,): float(getattr(load, field)) for tier, load in known().items()}

    def failures() -> dict[tuple[str, ...], float]:
        return {
            (tier, reason): float(count)
            for tier, load in known().items()
            for reason, count in (dict.fromkeys(_FAILURES, 0) | load.failures_total).items()
        }

    assert all(field in TierLoad.__slots__ for _, _, field in _TIER_LOAD)
    return [
        *(Reading(name, text, labels=("tier",), read_labelled=of_field(field)) for name, text, field in _TIER_LOAD),
        Reading(
            "kvfleet_worker_tier_failures_total",
            "blocks not had from the tier, or not in time",
            labels=("tier", "reason"),
            read_labelled=failures,
        ),
    ]


def device_load(load: Load, block_bytes: int, hit_tokens: int) -> TierLoad:
    """The device as a tier among the others."""
    return TierLoad(
        blocks=load.blocks_addressed,
        bytes_used=(load.blocks_used + load.blocks_cached) * block_bytes,
        bytes_total=load.blocks_total * block_bytes,
        hit_tokens_total=hit_tokens,
        evictions_total=load.evictions_total,
    )


def _engine_readings(engine: EngineThread) -> list[Reading]:
    times, counters = engine.cancel_to_free, engine.counters
    return [
        Reading(
            "kvfleet_worker_cancel_to_free_seconds",
            "from a cancel to when the blocks of what it ended were free",
            read_histogram=times.read,
        ),
        Reading("kvfleet_worker_cancel_to_free_max_seconds", "the longest of these", lambda: times.max),
        Reading(
            "kvfleet_worker_queue_wait_seconds",
            "from a request's coming to its first step",
            read_histogram=lambda: counters.queue_waits.read(),
        ),
        Reading("kvfleet_worker_steps_total", "steps of the engine", lambda: counters.steps_total),
        Reading(
            "kvfleet_worker_engine_busy_seconds_total",
            "time in steps: its rate is how busy the engine is",
            lambda: counters.busy_seconds_total,
        ),
        Reading(
            "kvfleet_worker_aborted_steps_total",
            "steps given up because all they computed for was cancelled",
            lambda: counters.steps_aborted_total,
        ),
        Reading(
            "kvfleet_worker_protected_blocks_total",
            "blocks of running sequences given to vaults so that a crash costs less",
            lambda: engine.protected_blocks_total,
        ),
        *_tenant_readings(lambda: counters.costs.accounts()),
    ]


def _tenant_readings(accounts: Callable[[], Mapping[str, TenantAccount]]) -> list[Reading]:
    def of_field(field: str) -> LabelledReader:
        return lambda: {(tenant,): float(getattr(account, field)) for tenant, account in accounts().items()}

    assert all(field in TenantAccount.__slots__ for _, _, field in _TENANT)
    return [
        Reading(f"kvfleet_worker_tenant_{name}", text, labels=("tenant",), read_labelled=of_field(field))
        for name, text, field in _TENANT
    ]


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

    return [
        Reading(
            "kvfleet_worker_transfer_bytes_total",
            "bytes between device and host, or over the data plane; in: to this worker, or up to its device",
            labels=("tier", "direction"),
            read_labelled=moved,
        ),
        Reading(
            "kvfleet_worker_refused_handshakes_total",
            "data-plane connections that were not let in",
            labels=("reason",),
            read_labelled=refused,
        ),
    ]


def _codec_readings(remote: RemoteTiers | None) -> list[Reading]:
    counts = remote.counts if remote is not None else RemoteCounts()
    return [
        Reading(
            "kvfleet_worker_quantised_snr_decibels",
            "signal to noise of blocks that were quantised for a vault",
            read_histogram=counts.snr_db.read,
        ),
        Reading("kvfleet_worker_quantised_blocks_total", "such blocks", lambda: counts.snr_db.count),
        Reading("kvfleet_worker_quantised_raw_bytes_total", "their bytes before", lambda: counts.quantised_raw_bytes),
        Reading("kvfleet_worker_quantised_bytes_total", "their bytes after", lambda: counts.quantised_bytes),
        Reading(
            "kvfleet_worker_kept_raw_blocks_total",
            "blocks that were to be quantised and would have been below the gate of signal to noise",
            lambda: counts.kept_raw,
        ),
    ]


def _device_readings(watch: DeviceWatch) -> list[Reading]:
    where = (watch.device,)

    def utilisation() -> dict[tuple[str, ...], float]:
        share = watch.utilisation()
        return {} if share is None else {where: share}

    def memory(which: int) -> LabelledReader:
        return lambda: {where: float(watch.memory()[which])}

    return [
        Reading(
            "kvfleet_worker_device_memory_used_bytes",
            "memory in use: of a GPU by all, on the CPU by this process",
            labels=("device",),
            read_labelled=memory(0),
        ),
        Reading(
            "kvfleet_worker_device_memory_bytes",
            "memory that there is: the GPU's, or the host's or cgroup's",
            labels=("device",),
            read_labelled=memory(1),
        ),
        Reading(
            "kvfleet_worker_device_utilisation_ratio",
            "share of the last moment in which something ran on the GPU; of GPUs with NVML alone",
            labels=("device",),
            read_labelled=utilisation,
        ),
    ]


def _info(worker: WorkerLoop, device: str) -> Reading:
    record = worker.record
    return Reading(
        "kvfleet_worker_info",
        "1; its labels say which worker this is, to be joined on the instance",
        labels=("worker", "model", "device"),
        read_labelled=lambda: {(record.id, record.model, device): 1.0},
    )


def readings(
    worker: WorkerLoop,
    connection: Connection,
    engine: EngineThread,
    watch: DeviceWatch,
    remote: RemoteTiers | None = None,
    served: Callable[[], DataPlaneCounters] = DataPlaneCounters,
    certificates: Mapping[str, str | Path | None] = {},
) -> list[Reading]:
    """`served`: what peers asked of this worker."""

    def of_load(field: str) -> Callable[[], float]:
        return lambda: float(getattr(worker.heartbeat().load, field))

    def tiers() -> dict[str, TierLoad]:
        load = worker.heartbeat().load
        device = device_load(load, worker.record.block_bytes, engine.counters.device_hit_tokens_total)
        return {Tier.DEVICE.value: device} | dict(load.tiers)

    assert all(field in Load.__slots__ for _, _, field in _LOAD)
    out = [Reading(name, text, of_load(field)) for name, text, field in _LOAD]
    return [
        *out,
        _info(worker, watch.device),
        *_tier_readings(tiers),
        *_engine_readings(engine),
        *_transfer_readings(engine, remote, served),
        *_codec_readings(remote),
        *_device_readings(watch),
        *common_readings("worker", connection, certificates),
        Reading(
            "kvfleet_worker_prefill_tokens_per_second",
            "measured",
            lambda: worker.heartbeat().rates.prefill_tokens_per_s,
        ),
        Reading(
            "kvfleet_worker_decode_steps_per_second", "measured", lambda: worker.heartbeat().rates.decode_steps_per_s
        ),
        Reading("kvfleet_worker_moved_requests_total", "requests handed over", lambda: worker.hand_over.moved_total),
        Reading(
            "kvfleet_worker_recomputed_tokens_total",
            "tokens of continued requests that an earlier attempt had computed",
            lambda: worker.frames.recomputed_total,
        ),
        Reading(
            "kvfleet_worker_step_seconds", "the longest of the last steps", lambda: worker.heartbeat().rates.step_s
        ),
        Reading(
            "kvfleet_worker_step_age_seconds",
            "how long the present step has taken so far",
            lambda: engine.step_age_s,
        ),
        Reading("kvfleet_worker_requests_total", "requests accepted", lambda: worker.requests.requests_total),
        Reading("kvfleet_worker_refused_requests_total", "requests refused", lambda: worker.requests.refused_total),
        Reading(
            "kvfleet_worker_malformed_messages_total",
            "messages that could not be read",
            lambda: worker.requests.malformed_total,
        ),
        Reading("kvfleet_worker_dropped_frames_total", "frames NATS did not take", lambda: worker.outbox.dropped_total),
        Reading(
            "kvfleet_worker_dropped_milestones_total",
            "what requests came to, never told to placement: NATS was away for long",
            lambda: worker.milestones.dropped_total,
        ),
    ]
