"""What members of the fleet say of themselves: records in the members bucket, and heartbeats. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvproto.codec_types import MaxLength, Range
from kvproto.messages.vocabulary import U64, Addresses, Count, Name, Role, Seconds, State


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A registered prefix that all tenants share, so short that records can carry it: see `tenant_roots`."""

    tokens: Count  # whole blocks
    digest: bytes  # of the token ids: 16 bytes


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's lease in the members bucket; the heartbeat carries what changes often."""

    id: Name
    epoch: Name
    lease: Name
    state: State
    model: Name
    address: Name
    host: Name
    pid: Count
    versions: tuple[int, ...]  # [min, max] of the wire
    bundle: Name = ""  # content hash of tokenizer, template and defaults
    model_revision: Name = ""
    block_size: Count = 16
    blocks: Count = 0
    context_length: Count = 0
    slots: Count = 0
    started_unix_ms: Count = 0
    block_bytes: Count = 0  # of one block, all layers
    public_prefixes: Annotated[tuple[PublicPrefix, ...], MaxLength(256)] = ()
    data_plane: Addresses = ()
    kv_format: bytes = b""  # 16 bytes: which blocks' bytes it can use (`kvproto.dataplane.block.kv_format`)
    attaches: bool = False  # an attempt of its may have several readers, and one of them may leave by itself
    born: Count = 0  # revision at which this life first registered; 0: this record's own


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """Lease of any other process: placement, ingress or vault."""

    id: Name
    epoch: Name
    lease: Name
    state: State
    role: Role
    host: Name
    pid: Count
    versions: tuple[int, ...]
    address: Name = ""
    inbox: Name = ""
    started_unix_ms: Count = 0
    data_plane: Addresses = ()
    born: Count = 0  # as a WorkerRecord's


@dataclass(frozen=True, slots=True)
class TierLoad:
    """One tier as a worker uses it, or as a vault is: `*_total` count since the start."""

    blocks: Count = 0
    bytes_used: Count = 0
    bytes_total: Count = 0
    hit_tokens_total: Count = 0  # of prompts, restored from it
    restores_total: Count = 0
    restored_bytes_total: Count = 0
    restore_seconds_total: Seconds = 0.0
    offloaded_blocks_total: Count = 0
    evictions_total: Count = 0
    failures_total: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(frozen=True, slots=True)
class PriorityLoad:
    """What a worker has to do of one priority. `unstarted` are those of `requests` that nobody has seen anything of."""

    priority: Annotated[int, Range(-100, 100)]
    requests: Count = 0  # waiting and running
    unstarted: Count = 0
    queued_prefill_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, blocks and tokens at a worker now; `*_total` count since its start."""

    waiting: Count = 0
    running: Count = 0
    slots: Count = 0
    blocks_used: Count = 0
    blocks_cached: Count = 0
    blocks_total: Count = 0
    queued_prefill_tokens: Count = 0
    prompt_tokens_total: Count = 0
    hit_tokens_total: Count = 0
    fed_tokens_total: Count = 0
    generated_tokens_total: Count = 0
    preemptions_total: Count = 0
    evictions_total: Count = 0
    blocks_addressed: Count = 0  # full blocks in the content index, held or not
    tiers: dict[str, TierLoad] = field(default_factory=dict)  # those below the device
    priorities: Annotated[tuple[PriorityLoad, ...], MaxLength(201)] = ()  # highest first; (): all is of priority 0
    oldest_wait_s: Seconds = 0.0  # of those of which nobody has seen anything yet


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured, not configured. 0 until measured."""

    prefill_tokens_per_s: Annotated[float, Range(0.0, 1e15)] = 0.0
    decode_steps_per_s: Annotated[float, Range(0.0, 1e15)] = 0.0
    decode_tokens_per_s: Annotated[float, Range(0.0, 1e15)] = 0.0
    restore_bytes_per_s: dict[str, float] = field(default_factory=dict)  # by tier, to the device
    step_s: Seconds = 0.0  # the longest of the last steps: a stream that is silent for much longer is in trouble


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Core NATS, about twice a second: liveness, load, and what an index needs to notice a lost last event.

    A vault sends the same, with its own id as `worker`.
    """

    worker: Name
    epoch: Name
    state: State
    load: Load = Load()
    rates: Rates = Rates()
    event_seq: Count = 0
    digest: U64 = 0  # XOR over all stored and removed operations ever published, of whatever tier
    held: Count = 0  # blocks the worker's content index holds
    step_age_s: Seconds = 0.0  # how long the engine has been in its present step
    tier_digest: U64 | None = None  # the same with the tier in each term; None: the sender knows only `digest`
