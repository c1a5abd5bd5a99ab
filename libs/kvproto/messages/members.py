"""What members of the fleet say of themselves: records in the members bucket, heartbeats, and, to placement, a worker's
blocks, milestones and requests that it hands over. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from kvproto.messages.requests import GenerateRequest
from kvproto.messages.vocabulary import U64, Addresses, Count, MaxLength, Name, Range, Role, Seconds, State, Tier


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A registered prefix that all tenants share, so short that records can carry it: see `block_hash`."""

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


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks that follow one another: each is the parent of the next."""

    parent: bytes
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierEvents:
    """One change of one tier: runs stored (`removed` False) or removed, in the order they happened."""

    tier: Tier
    removed: bool
    runs: tuple[BlockRun, ...]


@dataclass(frozen=True, slots=True)
class KvEvents:
    """`[epoch, seq, [[tier, removed, [[parent, [hash...]]...]]...]]`; encoded positionally by the codec."""

    epoch: str
    seq: int
    changes: tuple[TierEvents, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    tier: Tier | None = None  # None: all of them, complete at one and the same event


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One part of what a worker holds, raw 16-byte hashes back to back; complete at event `seq`.

    A part is of one tier; `parts` counts those of all tiers that were asked for.
    """

    epoch: Name
    seq: Count
    tier: Tier
    part: Count
    parts: Count
    digest: U64
    hashes: Annotated[bytes, MaxLength(1_000_000)]
    tier_digest: U64 | None = None  # as in a Heartbeat; then it is also the XOR over what all parts hold


class Passed(StrEnum):
    """What an attempt has come to at its worker."""

    ACCEPTED = "accepted"
    STARTED = "started"  # scheduled for the first time; says what was really cached
    FIRST_TOKEN = "first_token"
    ENDED = "ended"  # in whatever way


@dataclass(frozen=True, slots=True)
class Milestone:
    """One attempt got on. `seconds` are since its acceptance."""

    tenant: Name
    request: Name
    attempt: Count
    passed: Passed
    seconds: Seconds = 0.0
    prompt_tokens: Count = 0  # with `started`
    cached: dict[str, Count] = field(default_factory=dict)  # with `started`: tokens by tier
    output_tokens: Count = 0  # with `ended`
    code: Name | None = None  # with `ended`: of the error, if it was one


@dataclass(frozen=True, slots=True)
class Milestones:
    """What a worker's requests came to since it last said so: every placement replica hears it.

    `first` is the number of the first one in the worker's life: after an outage some are said again.
    """

    worker: Name
    epoch: Name
    items: Annotated[tuple[Milestone, ...], MaxLength(65_536)]
    first: Count | None = None


@dataclass(frozen=True, slots=True)
class Capsule:
    """All that a running request needs to go on elsewhere: what was asked for, with what has been generated as its
    continuation and `source` the worker that has its blocks. `attempt` is the one that ended.

    Readers that resume by themselves (a Client, an ingress) know all this. A bare producer's request is carried on by
    whichever placement takes the capsule.
    """

    tenant: Name
    worker: Name
    request: GenerateRequest
    held_attempt: Count | None = None  # of which `worker` has the blocks, where a placement has offered later ones
