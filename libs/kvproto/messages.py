"""Every message of the fleet: frozen dataclasses, encoded by `kvproto.codec` alone. Pure, no dicts past the codec.

Fields are only ever added, with a default; unknown ones are ignored by older readers. `Annotated` bounds are checked
when a message is read and the error names the field.

    producer ──ProducerRequest──▶ placement ──GenerateRequest──▶ worker ──frames──▶ the producer's inbox
    Client ──PlaceRequest──▶ placement ──Placement──▶ Client ──GenerateRequest──▶ worker ──frames──▶ Client
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from kvproto.codec_types import Ids, MaxLength, Range

Tokens32 = Annotated[tuple[int, ...], Ids(max_items=4_194_304)]  # token ids, packed u32le on the wire
MAX_NAME_CHARS = 256
Name = Annotated[str, MaxLength(MAX_NAME_CHARS)]  # ids, roles, model names
Text = Annotated[str, MaxLength(8_388_608)]
File = Annotated[str, MaxLength(67_108_864)]  # a tokenizer.json may have tens of megabytes
Addresses = Annotated[tuple[Annotated[str, MaxLength(256)], ...], MaxLength(8)]  # unix:PATH, tcp:HOST:PORT
Count = Annotated[int, Range(0, 2**63 - 1)]
U64 = Annotated[int, Range(0, 2**64 - 1)]
Seconds = Annotated[float, Range(0.0, 1e12)]
LogitBias = Annotated[dict[int, float], MaxLength(4096)]  # token id -> added to its logit


class State(StrEnum):
    """A member's state. `dead` is never written by a member itself: it is how readers show one that vanished."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Role(StrEnum):
    INGRESS = "ingress"
    PLACEMENT = "placement"
    WORKER = "worker"
    VAULT = "vault"


class Tier(StrEnum):
    """Where a worker gets blocks from, fastest first. `peer` is another worker's device or host: nobody says that it
    holds blocks there."""

    DEVICE = "device"
    HOST = "host"
    VAULT = "vault"
    PEER = "peer"

    @property
    def number(self) -> int:
        """Among tiers, the device's being 0."""
        return tuple(Tier).index(self)


class Encoding(StrEnum):
    """How a worker writes the frames of one request."""

    FRAMES = "frames"  # compact, possibly many sequences in one message
    MSGPACK = "msgpack"  # one map per message, ids as a list: for producers in any language
    JSON = "json"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Overflow(StrEnum):
    """What happens to a request that does not fit into the model's context."""

    ERROR = "error"  # it is refused
    TRUNCATE_LEFT = "truncate_left"  # the oldest prompt tokens are dropped until prompt and `max_tokens` fit
    TRUNCATE_GENERATION = "truncate_generation"  # `max_tokens` becomes what is left after the prompt
    SLIDING = "sliding"  # whenever the context is full its older half is dropped and generation goes on


class AdminCommand(StrEnum):
    DRAIN = "drain"
    STATS = "stats"
    INSPECT = "inspect"
    BUNDLE = "bundle"
    READ_KV = "read_kv"
    ERASE = "erase"  # what only this token sequence has, from device, host and vaults


# ---------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. A token's random number depends on (seed, choice, generated index) alone.

    `temperature` 0 is greedy; `top_k` 0 means no limit. `seed` is drawn by the ingress or Client when the caller gives
    none, so a moved or replayed sequence draws the same tokens; a worker takes none as 0. Stop tokens are neither
    emitted nor counted.

    Logits are changed in this order: `repetition_penalty` (prompt and output, as in transformers), `frequency_penalty`
    and `presence_penalty` (output only, as OpenAI states them), `logit_bias`, stop tokens out before `min_tokens`; then
    temperature, `top_k`, `top_p` and `min_p` (least probability, as a share of the most probable token's). `logprobs`
    asks for each token's log probability by the model itself, before all of that, and that of so many alternatives.
    """

    max_tokens: Annotated[int, Range(1, 16_777_216)]
    temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
    top_p: Annotated[float, Range(0.0, 1.0)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    stop: Annotated[tuple[Annotated[str, MaxLength(1024)], ...], MaxLength(16)] = ()
    stop_ids: Annotated[tuple[int, ...], MaxLength(256)] = ()
    ignore_eos: bool = False
    n: Annotated[int, Range(1, 128)] = 1  # choices: continuations of one prompt, each with random numbers of its own
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    frequency_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    repetition_penalty: Annotated[float, Range(0.001, 1000.0)] = 1.0
    logit_bias: LogitBias = field(default_factory=dict)
    logprobs: Annotated[int, Range(0, 128)] | None = None  # alternatives beside the token's own; None: nothing at all
    min_tokens: Count = 0
    overflow: Overflow = Overflow.ERROR


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """Which worker should do this? Tenant and model are tokens of the subject; `model` is the real name."""

    request: Name
    model: Name
    prompt_ids: Tokens32 = ()
    prompt: Text | None = None  # instead of ids, from a producer that cannot tokenise
    session: Name | None = None
    attempt: Count = 0
    excluded: Annotated[tuple[Name, ...], MaxLength(4096)] = ()  # workers this request has already lost
    max_tokens: Count = 0  # of all choices together
    policy: Name | None = None
    worker: Name | None = None  # for the policy `direct`
    priority: Annotated[int, Range(-100, 100)] = 0
    max_wait_s: Seconds | None = None  # refuse it, with a time to retry, rather than have it wait longer for a start
    excluded_regions: Annotated[tuple[Name, ...], MaxLength(256)] = ()  # that could not take it
    seeks_source: bool = False  # who is asking has a worker, and wants to know who holds most of the prompt
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None  # so long its asker waits for the answer, and then
    expires_unix_ms: Annotated[int, Range(0, 2**53)] | None = None  # does without: by its own clock


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `expected_hit` counts tokens per tier.

    `attached`: the request is known already, and `attempt` of it runs, or ended a short while ago, at `worker`: whoever
    sends it there reads along from the beginning.

    `region` without a worker: ask that region's placement. With `source` it then says who of this region has blocks for
    it; `elsewhere` names a region that may have more of the prompt than `worker`. A source in another region comes with
    its addresses and the fleet's seal on them (`kvproto.regions.seal`).
    """

    request: Name
    worker: Name
    attempt: Count
    expected_hit: dict[str, int] = field(default_factory=dict)
    expected_ttft_s: float | None = None
    policy: Name = ""
    why: Text = ""
    placement: Name = ""
    source: Name = ""  # another worker that holds more of the prompt on its device or host
    source_tokens: Count = 0
    attached: bool = False
    region: Name = ""
    elsewhere: Name = ""
    source_addresses: Addresses = ()
    source_seal: Annotated[bytes, MaxLength(64)] = b""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One choice as earlier attempts left it: generation goes on after `output_ids`, unless it has ended."""

    output_ids: Tokens32 = ()
    text_sent: Count = 0  # characters that are with the client
    finished: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One attempt at one request, published to one worker; the NATS reply subject gets `Accepted` or `Failed`.

    `output_ids` are tokens that an earlier attempt generated: generation goes on after them, and `text_sent`
    characters of text are already with the client. Where several choices are asked for, `continuations` says so of each
    (none: from the beginning). `expires_unix_ms` guards against late delivery after a reconnect;
    `deadline_ms` is what remained of the caller's patience when it was sent. Either `prompt_ids` or `prompt` is set.

    An attempt that its worker knows already gets one more reader: the new inbox gets all frames from the first on.
    """

    request: Name
    attempt: Count
    model: Name
    sampling: Sampling
    inbox: Annotated[str, MaxLength(512)]  # frames of this request go here
    prompt_ids: Tokens32 = ()
    prompt: Text | None = None
    output_ids: Tokens32 = ()
    text_sent: Count = 0
    encoding: Encoding = Encoding.FRAMES
    session: Name | None = None
    priority: Annotated[int, Range(-100, 100)] = 0
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None
    expires_unix_ms: Annotated[int, Range(0, 2**53)] | None = None
    traceparent: Annotated[str, MaxLength(128)] | None = None
    watcher: Name | None = None  # the placement that booked it and wants to see it end (bare producers)
    continuations: Annotated[tuple[Continuation, ...], MaxLength(128)] = ()
    exact: bool = False  # no block that was ever quantised, and none computed on one, is used
    source: Name = ""  # a worker to pull blocks from, as placement said
    source_tokens: Count = 0
    handed_over: bool = False  # `source` lets go of the sequence: its blocks are brought whatever computing would cost
    source_addresses: Addresses = ()  # of a source in another region
    source_seal: Annotated[bytes, MaxLength(64)] = b""
    again: bool = False  # sent once more, as the answer may be lost: who reads there already is sent nothing twice

    def continuation(self, choice: int) -> Continuation:
        """Where a choice goes on."""
        if self.sampling.n == 1:
            return Continuation(self.output_ids, self.text_sent)
        return self.continuations[choice] if choice < len(self.continuations) else Continuation()


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """What a bare producer sends to `kvf.generate.<tenant>.<model>`, as a msgpack map or as JSON; flat on purpose.

    Frames go to the NATS reply subject, in the encoding of the request.
    """

    prompt: Text | None = None
    prompt_ids: Annotated[tuple[int, ...], Ids(max_items=4_194_304)] = ()
    model: Name | None = None  # the real name, where it is no legal subject token
    max_tokens: Annotated[int, Range(1, 16_777_216)] = 50
    temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
    top_p: Annotated[float, Range(0.0, 1.0)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    stop: Annotated[tuple[Annotated[str, MaxLength(1024)], ...], MaxLength(16)] = ()
    ignore_eos: bool = False
    session: Name | None = None  # an affinity key; history stays with the producer
    priority: Annotated[int, Range(-100, 100)] = 0
    deadline_ms: Annotated[int, Range(0, 2**53)] | None = None
    request: Annotated[str, MaxLength(64)] | None = None
    traceparent: Annotated[str, MaxLength(128)] | None = None
    n: Annotated[int, Range(1, 128)] = 1
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    frequency_penalty: Annotated[float, Range(-100.0, 100.0)] = 0.0
    repetition_penalty: Annotated[float, Range(0.001, 1000.0)] = 1.0
    logit_bias: LogitBias = field(default_factory=dict)
    logprobs: Annotated[int, Range(0, 128)] | None = None
    min_tokens: Count = 0
    context_overflow: Overflow = Overflow.ERROR
    exact: bool = False


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A reader leaves. The attempt ends with its last one; without `inbox` all of them leave.

    For an attempt that was handed over it is the word that its successor has begun.
    """

    request: Name
    attempt: Count | None = None  # None: any attempt
    inbox: Annotated[str, MaxLength(512)] = ""
    received: Annotated[tuple[Count, ...], MaxLength(128)] = ()  # tokens of each choice: what comes after is forgotten


@dataclass(frozen=True, slots=True)
class ResendRequest:
    """Repeat the frames of a request from a generated index on. Also the question "are you still there?".

    `from_indices` are those of its choices where they differ; a choice beyond them begins at `from_index`.
    """

    request: Name
    attempt: Count
    from_index: Count
    inbox: Annotated[str, MaxLength(512)]
    from_indices: Annotated[tuple[Count, ...], MaxLength(128)] = ()


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A reader wants no more for now, or goes on (all of them, without `inbox`). Parked is what all want no more of."""

    request: Name
    attempt: Count
    paused: bool
    inbox: Annotated[str, MaxLength(512)] = ""


# ---------------------------------------------------------------------------------------------- frames


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker has the request: from here on it sends exactly one terminal frame."""

    request: Name
    attempt: Count
    worker: Name
    epoch: Name


@dataclass(frozen=True, slots=True)
class Started:
    """What was really cached, per tier, in tokens. Sent once, before the first tokens."""

    request: Name
    attempt: Count
    worker: Name
    prompt_tokens: Count
    cached: dict[str, int]
    queue_s: Seconds = 0.0
    recomputed_tokens: Count = 0  # of a continued attempt: what an earlier one had computed, and is computed again

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities: the token's own, and the most probable ones, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens `index` ... `index + len(ids) - 1` of one choice, one piece of text per id.

    Pieces may be empty while text is held back (a character or a stop string may be incomplete); together they are
    exactly the final text. `logprobs` has one entry per id where the request asked for them, else none.
    """

    request: str
    attempt: int
    choice: int
    index: int
    ids: Tokens32
    text: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """Not terminal: one of several choices has ended. Sent for each, before `Finished`, and only where n > 1."""

    request: Name
    attempt: Count
    choice: Count
    reason: FinishReason
    output_tokens: Count  # of this choice, those of earlier attempts included


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal. `output_tokens` counts all generated tokens, those of earlier attempts included.

    Of several choices it is the sum of theirs, and `reason` is that of choice 0.
    """

    request: Name
    attempt: Count
    reason: FinishReason
    prompt_tokens: Count
    output_tokens: Count
    cached_tokens: Count = 0
    worker: Name = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal. `retryable`: the same request may succeed elsewhere."""

    request: Name
    attempt: Count
    code: Name
    message: Text
    retryable: bool = False
    field: Name | None = None
    output_tokens: Count = 0
    retry_after_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """Terminal for this attempt: the worker lets go of the sequence; go on elsewhere after `output_tokens`."""

    request: Name
    attempt: Count
    output_tokens: Count
    to: Name | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Answer to ResendRequest: the worker lives and has generated tokens up to `next_index`.

    Of several choices that is the sum of theirs: a reader that has fewer in all lacks some.
    """

    request: Name
    attempt: Count
    next_index: Count
    step_age_s: Seconds = 0.0  # how long the engine has been in its present step


Frame = Accepted | Started | Tokens | ChoiceFinished | Finished | Failed | Moved | Progress
TERMINAL = (Finished, Failed, Moved)


# ---------------------------------------------------------------------------------------------- members


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


# ---------------------------------------------------------------------------------------------- events


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


# ---------------------------------------------------------------------------------------------- milestones


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


# ---------------------------------------------------------------------------------------------- capsules


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


# ---------------------------------------------------------------------------------------------- admin


@dataclass(frozen=True, slots=True)
class Stray:
    """Token ids that were computed behind the first `start` of a history, and are no part of it."""

    start: Count
    ids: Tokens32


Strays = Annotated[tuple[Stray, ...], MaxLength(256)]


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """A command on a worker's admin subject, answered part by part. `inspect`, `read_kv` and `erase` name tenant and
    ids, `erase` also the strays beside them. Ids that are too many for one message are told before, under the name of
    the `question`: see `kvproto.admin`.
    """

    command: AdminCommand
    tenant: Name = ""
    ids: Tokens32 = ()
    layer: Count = 0
    part: Count = 0
    question: Name = ""
    ids_before: Count = 0  # that were told of this question
    more_ids: bool = False  # it is not the question yet
    keep: Count = 0  # leading ids that `erase` leaves alone
    strays: Strays = ()


@dataclass(frozen=True, slots=True)
class AdminReply:
    """The asked part of an answer; `data` of all parts together is the answer's bytes. An error has `code` set."""

    part: Count = 0
    parts: Count = 1
    data: Annotated[bytes, MaxLength(1_000_000)] = b""
    digest: Name = ""
    code: Name | None = None
    message: Text = ""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Answer to `stats`."""

    record: WorkerRecord
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class Inspection:
    """Answer to `inspect`: how much of a token sequence this worker holds."""

    cached_tokens: Count
    blocks: tuple[int, ...]
    tiers: dict[str, Count] = field(default_factory=dict)  # tokens from the start, in the tier or a faster one


@dataclass(frozen=True, slots=True)
class Bundle:
    """What an ingress needs of a model: it holds no model files, so both always agree."""

    model: Name
    tokenizer_json: File
    chat_template: Text | None
    bos_token: Name | None
    eos_token: Name | None
    stop_ids: tuple[int, ...]
    context_length: Count
    vocab_size: Count
    default_temperature: float | None = None
    default_top_p: float | None = None
    default_top_k: int | None = None
    model_revision: Name = ""
    block_size: Count = 16
    special_tokens: dict[str, str] = field(default_factory=dict)
    public_prefixes: tuple[Tokens32, ...] = ()  # shared by all tenants: whole blocks of registered system prompts


# ---------------------------------------------------------------------------------------------- sessions


@dataclass(frozen=True, slots=True)
class Turn:
    """The running turn of a session: at most one, leased so that a dead ingress does not lock it for ever."""

    request: Name
    ingress: Name
    expires_unix_ms: Count


@dataclass(frozen=True, slots=True)
class SessionHead:
    """Head of a session; its token ids lie in chunks of 4,096 u32 beside it. Written by compare-and-set only.

    A repeat of the turn `last_request` finds by `last_start`, where that turn's prompt begins, what was before it.
    """

    seq_id: Annotated[str, MaxLength(1024)]
    model: Name
    length: Count  # committed token ids
    turns: Count
    created_unix_ms: Count
    updated_unix_ms: Count
    worker: Name = ""  # where the last turn ran
    turn: Turn | None = None
    generation: Name = ""  # which set of chunks is current
    last_request: Name = ""  # whose turn was committed last
    last_start: Count = 0
    left_request: Name = ""  # whose turn was cut since then
    regions: Annotated[tuple[Name, ...], MaxLength(256)] = ()  # other ones, where turns of it ran
    strays: Count = 0  # token ids of what its requests computed beside the history


@dataclass(frozen=True, slots=True)
class SessionStrays:
    """What requests of a session computed beside its history: cut turns, choices that it did not go on with."""

    chains: Strays


# ---------------------------------------------------------------------------------------------- ingresses


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """How far an ingress has counted what one caller, or all callers of a tenant together, use of their limits.

    Counts are of one `life` of the account at that ingress, whose number only grows, as they do within it: who misses
    a report learns all from the next. What is `lacking` is as that ingress sees it, of all ingresses together.
    """

    tenant: Name
    life: Count
    caller: Name = ""  # "": all of the tenant's together
    age_s: Seconds = 0.0  # of this life
    running: Count = 0
    requests: Count = 0
    tokens: Count = 0
    day: Count = 0  # since 1970, UTC
    day_tokens: Count = 0  # on that day
    lacking_requests: Annotated[float, Range(0.0, 1e18)] = 0.0  # in its bucket, until it is full
    lacking_tokens: Annotated[float, Range(0.0, 1e18)] = 0.0
    lacking_day_tokens: Count = 0
    requests_per_minute: Annotated[float, Range(0.0, 1e18)] = 0.0  # its limits, for who does not know them yet
    tokens_per_minute: Annotated[float, Range(0.0, 1e18)] = 0.0
    tokens_per_day: Count = 0
    ended: bool = False  # nobody would miss it: whatever is told of this name later is of another life


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What one ingress tells the others of its region, on `kvf.ingress.usage`; `seq` grows within its epoch."""

    ingress: Name
    epoch: Name
    seq: Count
    accounts: Annotated[tuple[AccountUsage, ...], MaxLength(4096)]


# ---------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True, slots=True)
class ModelSignals:
    """What there is to do for one model, and how many workers it should have for that (docs/autoscaling.md)."""

    model: Name
    queue_depth: Count = 0  # requests that wait at workers, are on their way there, or were refused just now
    oldest_wait_s: Seconds = 0.0
    saturation: Annotated[float, Range(0.0, 1e12)] = 0.0  # work to be done, of what its ready workers can do
    desired: Count = 0
    ready: Count = 0
    living: Count = 0  # ready, or starting
    minimum: Count = 0
    maximum: Count = 0
    known: bool = True  # every ready worker was heard of a moment ago
    settled_s: Seconds = 0.0  # for so long it was watched without a change or a gap
    parts: dict[str, float] = field(default_factory=dict)  # of what `saturation` is made: in workers
    next_ordinal: Name = ""  # whom a StatefulSet would remove next


@dataclass(frozen=True, slots=True)
class PlacementStats:
    """Answer on `kvf.placement.stats`: one replica's view."""

    placement: Name
    policy: Name
    workers: tuple[Name, ...]
    decisions_total: Count
    no_worker_total: Count
    forwarded_total: Count
    booked: Count
    prompt_tokens_total: Count = 0  # of requests that it placed and that started
    attained_tokens_total: Count = 0  # of them, found in a cache
    attainable_tokens_total: Count = 0  # what the best candidate had
    lost_tokens_total: Count = 0  # attainable but not attained, request by request
    index_blocks: Count = 0
    workers_exact: Count = 0  # workers whose events are followed without a gap
    models: Annotated[tuple[ModelSignals, ...], MaxLength(4096)] = ()


@dataclass(frozen=True, slots=True)
class Booked:
    """Work that a placement replica sent to a worker, for the other replicas to count it too."""

    tenant: Name
    request: Name
    attempt: Count
    worker: Name
    tokens: Count  # to prefill, as expected
    priority: Annotated[int, Range(-100, 100)] = 0
    silent_ms: Count | None = None  # of which nothing is heard for so long was never sent; None: 5 s
    hashes: Annotated[bytes, MaxLength(65_536)] = b""  # of the prompt's first blocks: the worker will have them


@dataclass(frozen=True, slots=True)
class Refused:
    """Requests for a model that a placement replica had to refuse, for want of a worker or of time."""

    model: Name
    requests: Count
    tokens: Count  # to prefill, as expected


@dataclass(frozen=True, slots=True)
class WentAbroad:
    """A request was referred to another region: what continues its prompt may find blocks there."""

    last: bytes  # hash of the prompt's last full block
    blocks: Count
    region: Name


@dataclass(frozen=True, slots=True)
class BookedBatch:
    placement: Name
    items: Annotated[tuple[Booked, ...], MaxLength(65_536)]
    refused: Annotated[tuple[Refused, ...], MaxLength(4096)] = ()
    abroad: Annotated[tuple[WentAbroad, ...], MaxLength(4096)] = ()


@dataclass(frozen=True, slots=True)
class Watch:
    """A bare producer's request that a worker accepted: if that life of it is lost, `inbox` must hear so."""

    tenant: Name
    request: Name
    attempt: Count
    worker: Name
    epoch: Name
    inbox: Annotated[str, MaxLength(512)]
    encoding: Encoding = Encoding.MSGPACK


@dataclass(frozen=True, slots=True)
class Watches:
    """What a placement that goes was watching: whichever replica hears this goes on."""

    placement: Name
    items: Annotated[tuple[Watch, ...], MaxLength(65_536)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as a decision saw it. `terms` are milliseconds, their sum is the cost; `matched` are tokens by tier."""

    worker: Name
    cost_ms: float
    terms: dict[str, float] = field(default_factory=dict)
    matched: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Actual:
    """What became of a decision, as far as its worker has said."""

    accepted: bool = False
    cached: dict[str, int] | None = None  # tokens by tier; None until it started
    queue_s: Seconds | None = None
    ttft_s: Seconds | None = None  # from acceptance to the first token
    output_tokens: Count = 0
    ended: bool = False
    code: Name | None = None  # of the error it ended with


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of a placement ledger."""

    request: Name
    attempt: Count
    tenant: Name
    model: Name
    unix_ms: Count
    policy: Name
    worker: Name
    why: Text
    prompt_tokens: Count
    expected_hit: dict[str, int]
    expected_ttft_s: float | None
    candidates: tuple[Candidate, ...]  # the best ones, cheapest first
    candidates_total: Count
    placement: Name
    actual: Actual = Actual()
    source: Name = ""  # whom the worker was to pull from, and what that one had
    source_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """Why was this request placed as it was? `tenant`: only if it is this one's.

    With `newest`: of no request, but of so many of the last decisions, of this `model` if one is named. A replica that
    does not know the field finds none of them.
    """

    request: Name
    tenant: Name | None = None
    newest: Count = 0
    model: Name | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One replica's answer: its decisions about the request, one per attempt, oldest first; none if it knows none.

    Of the newest ones the newest first, in parts: `more` says that this is not the last.
    """

    placement: Name
    decisions: tuple[Decision, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class HotChain:
    """A prefix in demand: hashes back to back, the roots that its blocks are kept under, and who has them."""

    hashes: Annotated[bytes, MaxLength(1_000_000)]
    root: bytes
    public_root: bytes = b""  # of the first `public_blocks`
    public_blocks: Count = 0
    source: Name = ""  # a worker; "": vaults
    heat: float = 0.0  # requests of about the last half hour


@dataclass(frozen=True, slots=True)
class PreloadRequest:
    """A worker that is about to be ready asks what it should have: at most so many blocks."""

    worker: Name
    model: Name
    model_revision: Name
    block_size: Count
    blocks: Count
    leaving: bool = False  # it is about to go, and asks what only it has: for vaults to keep


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """Hottest first."""

    placement: Name
    chains: Annotated[tuple[HotChain, ...], MaxLength(4096)] = ()


@dataclass(frozen=True, slots=True)
class VictimRequest:
    """Which worker of a model (default: of any) is the cheapest to lose?"""

    model: Name = ""


@dataclass(frozen=True, slots=True)
class VictimCost:
    """What would be lost with a worker: blocks that nobody else holds, and the seconds to compute again those of them
    that are in demand."""

    worker: Name
    seconds: Seconds
    unique_blocks: Count
    unique_hot_blocks: Count
    requests: Count  # that it works on now


@dataclass(frozen=True, slots=True)
class VictimReport:
    """Cheapest first."""

    placement: Name
    workers: tuple[VictimCost, ...] = ()


# ---------------------------------------------------------------------------------------------- regions


@dataclass(frozen=True, slots=True)
class RegionModel:
    """What a region can do for a model. `record` is one of its workers, whom one can ask for its tokenizer."""

    model: Name
    ready: Count
    wait_s: Seconds  # until a ready worker would begin a request that comes now
    record: WorkerRecord
    workers: Annotated[tuple[Name, ...], MaxLength(4096)] = ()  # all that are ready or drain; (): it did not say


@dataclass(frozen=True, slots=True)
class RegionSummary:
    """What one placement replica tells other regions once a second."""

    region: Name
    placement: Name
    models: Annotated[tuple[RegionModel, ...], MaxLength(1024)] = ()
