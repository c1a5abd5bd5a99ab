"""Messages of members about themselves: records in the members bucket, heartbeats, and a worker's reports to placement.
Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from kvproto.messages.requests import GenerateRequest
from kvproto.messages.vocabulary import (
    U64,
    Addresses,
    Count,
    MaxLength,
    Name,
    Range,
    Role,
    Seconds,
    State,
    Tier,
    WorkerRole,
)


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """Length and digest of a registered prefix that all tenants share: see `block_hash`."""

    tokens: Count  # whole blocks
    digest: bytes  # blake2b of the packed token ids: 16 bytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a worker has loaded: a model of the fleet by this name. `revision` stands for its files."""

    name: Name
    revision: Name

    @property
    def lora(self) -> str:
        """In the roots of its blocks. vLLM finds none of them under another name, so the name is in it, too."""
        return f"{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Loading:
    """What a starting worker does."""

    doing: Name
    weight_bytes: Count = 0  # that are loaded
    total_bytes: Count = 0  # of weights; 0: not known
    kernels: Count = 0  # compiled by this process


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
    kv_format: bytes = b""  # 16 bytes: layout of usable blocks (`kvproto.dataplane.block.kv_format`)
    attaches: bool = False  # an attempt may have several readers, each of which may leave
    born: Count = 0  # revision at which this life first registered; 0: this record's own
    engine: Name = "own"  # or `vllm`: a server beside the worker
    engine_pid: Count = 0  # of that server's engine on the worker's host, which changes when it restarts; 0: none
    adapters: Annotated[tuple[Adapter, ...], MaxLength(256)] = ()  # of `model`, loaded and ready whenever it is
    grammars: bool = False  # it follows `Sampling.grammar`, which others would ignore
    chats: bool = False  # it renders `GenerateRequest.chat`, which others would not find
    scores: bool = False  # it follows `Sampling.prompt_logprobs`, and may generate nothing
    beams: bool = False  # it follows `Sampling.beams`, which others would ignore
    loading: Loading | None = None  # while `state` is `starting`
    role: WorkerRole | None = None  # None: of an older version, which neither hands over nor fetches ahead
    pauses: bool = False  # it follows `ReturnExpected`, which others would not hear

    @property
    def models(self) -> dict[str, str]:
        """The names that it serves, its model's first, and for each what is its own in the roots of its blocks."""
        return {self.model: "", **{one.name: one.lora for one in self.adapters}}

    def serves(self, name: str) -> bool:
        return name == self.model or any(one.name == name for one in self.adapters)


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
    """One tier of a worker, or a vault's own; `*_total` count since the start."""

    blocks: Count = 0
    bytes_used: Count = 0
    bytes_total: Count = 0
    hit_tokens_total: Count = 0  # prompt tokens restored from it
    restores_total: Count = 0
    restored_bytes_total: Count = 0
    restore_seconds_total: Seconds = 0.0
    offloaded_blocks_total: Count = 0
    evictions_total: Count = 0
    failures_total: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(frozen=True, slots=True)
class PriorityLoad:
    """A worker's requests of one priority."""

    priority: Annotated[int, Range(-100, 100)]
    requests: Count = 0  # waiting and running
    unstarted: Count = 0  # of them, those without any output yet
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
    oldest_wait_s: Seconds = 0.0  # of requests without any output yet
    paused: Count = 0  # conversations that are expected back
    brought_blocks_total: Count = 0  # restored while their conversations paused
    given_back_blocks_total: Count = 0  # of them, those whose conversations did not come back in time
    saved_s_total: Seconds = 0.0  # of restoring, which turns that came back did not wait for


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured, not configured. 0 until measured."""

    prefill_tokens_per_s: Annotated[float, Range(0.0, 1e15)] = 0.0
    decode_steps_per_s: Annotated[float, Range(0.0, 1e15)] = 0.0
    decode_tokens_per_s: Annotated[float, Range(0.0, 1e15)] = 0.0
    restore_bytes_per_s: dict[str, float] = field(default_factory=dict)  # by tier, to the device
    step_s: Seconds = 0.0  # the longest of the last steps


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent twice a second. A vault puts its own id into `worker`. Sequence and digest reveal a lost event."""

    worker: Name
    epoch: Name
    state: State
    load: Load = Load()
    rates: Rates = Rates()
    event_seq: Count = 0
    digest: U64 = 0  # XOR over all published stored and removed operations, of any tier
    held: Count = 0  # blocks in the worker's content index
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
    tier: Tier | None = None  # None: all tiers, complete at the same event


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One part of a worker's blocks at event `seq`: 16-byte hashes back to back, of one tier."""

    epoch: Name
    seq: Count
    tier: Tier
    part: Count
    parts: Count  # of all requested tiers
    digest: U64
    hashes: Annotated[bytes, MaxLength(1_000_000)]
    tier_digest: U64 | None = None  # as in a Heartbeat; also the XOR over the blocks of all parts


class Passed(StrEnum):
    """A stage of an attempt at its worker."""

    ACCEPTED = "accepted"
    STARTED = "started"  # scheduled for the first time
    FIRST_TOKEN = "first_token"
    ENDED = "ended"  # in any way


@dataclass(frozen=True, slots=True)
class Milestone:
    """An attempt's progress."""

    tenant: Name
    request: Name
    attempt: Count
    passed: Passed
    seconds: Seconds = 0.0  # since its acceptance
    prompt_tokens: Count = 0  # with `started`
    cached: dict[str, Count] = field(default_factory=dict)  # with `started`: tokens by tier
    output_tokens: Count = 0  # with `ended`
    code: Name | None = None  # with `ended`: the error's code, if any
    saved_s: Seconds = 0.0  # with `started`: of restoring, done while the conversation paused


@dataclass(frozen=True, slots=True)
class Milestones:
    """A worker's new milestones, for all placement replicas. After an outage some are repeated."""

    worker: Name
    epoch: Name
    items: Annotated[tuple[Milestone, ...], MaxLength(65_536)]
    first: Count | None = None  # number of the first item in the worker's life


@dataclass(frozen=True, slots=True)
class Capsule:
    """A bare producer's running request, for any placement replica to continue elsewhere. `request` has the generated
    tokens as its continuation, the worker with its blocks as `source`, and the attempt that ended."""

    tenant: Name
    worker: Name
    request: GenerateRequest
    held_attempt: Count | None = None  # whose blocks `worker` has, where a placement has offered later attempts
