"""Messages between placement replicas, also of other regions, and their answers about decisions and advice. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvproto.messages.members import WorkerRecord
from kvproto.messages.vocabulary import Count, Encoding, MaxLength, Name, Range, Seconds, Text


@dataclass(frozen=True, slots=True)
class ModelSignals:
    """The work for one model, and how many workers it should have (docs/autoscaling.md)."""

    model: Name
    queue_depth: Count = 0  # requests that wait at workers, are on their way there, or were refused just now
    oldest_wait_s: Seconds = 0.0
    saturation: Annotated[float, Range(0.0, 1e12)] = 0.0  # work, as a share of what its ready workers can do
    desired: Count = 0
    ready: Count = 0
    living: Count = 0  # ready, or starting
    minimum: Count = 0
    maximum: Count = 0
    known: bool = True  # every ready worker was heard a moment ago
    settled_s: Seconds = 0.0  # time without a change or a gap
    parts: dict[str, float] = field(default_factory=dict)  # terms of `saturation`, in workers
    next_ordinal: Name = ""  # the worker that a StatefulSet would remove next


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
    prompt_tokens_total: Count = 0  # of placed requests that started
    attained_tokens_total: Count = 0  # of them, found in a cache
    attainable_tokens_total: Count = 0  # cached at the best candidate
    lost_tokens_total: Count = 0  # attainable but not attained, request by request
    index_blocks: Count = 0
    workers_exact: Count = 0  # workers whose events are followed without a gap
    models: Annotated[tuple[ModelSignals, ...], MaxLength(4096)] = ()
    paused: Count = 0  # conversations that are expected back
    saved_s_total: Seconds = 0.0  # of restoring, done while conversations paused


@dataclass(frozen=True, slots=True)
class Booked:
    """Work that one replica sent to a worker, for the other replicas to count."""

    tenant: Name
    request: Name
    attempt: Count
    worker: Name
    tokens: Count  # to prefill, as expected
    priority: Annotated[int, Range(-100, 100)] = 0
    silent_ms: Count | None = None  # after so long without a milestone the work was never sent; None: 5 s
    hashes: Annotated[bytes, MaxLength(65_536)] = b""  # of the prompt's first blocks: the worker will have them


@dataclass(frozen=True, slots=True)
class Refused:
    """Requests for a model that one replica refused, for want of a worker or of time."""

    model: Name
    requests: Count
    tokens: Count  # to prefill, as expected


@dataclass(frozen=True, slots=True)
class WentAbroad:
    """A request was referred to another region, where continuations of its prompt may find blocks."""

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
    """A bare producer's accepted request: if that life of the worker is lost, `inbox` must get an error."""

    tenant: Name
    request: Name
    attempt: Count
    worker: Name
    epoch: Name
    inbox: Annotated[str, MaxLength(512)]
    encoding: Encoding = Encoding.MSGPACK


@dataclass(frozen=True, slots=True)
class Watches:
    """Requests that a draining placement watched: any other replica goes on watching."""

    placement: Name
    items: Annotated[tuple[Watch, ...], MaxLength(65_536)]


@dataclass(frozen=True, slots=True)
class RegionModel:
    """A region's capacity for one model."""

    model: Name
    ready: Count
    wait_s: Seconds  # until a ready worker would begin a new request
    record: WorkerRecord  # one of its workers, which has the tokenizer
    workers: Annotated[tuple[Name, ...], MaxLength(4096)] = ()  # all that are ready or drain; (): unknown


@dataclass(frozen=True, slots=True)
class RegionSummary:
    """Sent by each placement replica to other regions once a second."""

    region: Name
    placement: Name
    models: Annotated[tuple[RegionModel, ...], MaxLength(1024)] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker in a decision."""

    worker: Name
    cost_ms: float
    terms: dict[str, float] = field(default_factory=dict)  # of the cost, in milliseconds
    matched: dict[str, int] = field(default_factory=dict)  # tokens by tier


@dataclass(frozen=True, slots=True)
class Actual:
    """The outcome of a decision, as far as its worker has reported it."""

    accepted: bool = False
    cached: dict[str, int] | None = None  # tokens by tier; None until it started
    queue_s: Seconds | None = None
    ttft_s: Seconds | None = None  # from acceptance to the first token
    output_tokens: Count = 0
    ended: bool = False
    code: Name | None = None  # of the error it ended with
    total_s: Seconds | None = None  # from acceptance to its end
    saved_s: Seconds = 0.0  # of restoring, done while its conversation paused


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
    source: Name = ""  # another worker to pull blocks from
    source_tokens: Count = 0  # that it had


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """Asks for a request's decisions, or with `newest` for that many of the last ones."""

    request: Name
    tenant: Name | None = None  # only decisions of this tenant
    newest: Count = 0
    model: Name | None = None  # with `newest`: only decisions of this model


@dataclass(frozen=True, slots=True)
class Explanation:
    """One replica's decisions: about a request one per attempt, oldest first; with `newest` the newest first."""

    placement: Name
    decisions: tuple[Decision, ...] = ()
    more: bool = False  # another part follows


@dataclass(frozen=True, slots=True)
class HotChain:
    """A prefix in demand, with the roots under which its blocks are kept."""

    hashes: Annotated[bytes, MaxLength(1_000_000)]  # back to back
    root: bytes
    public_root: bytes = b""  # of the first `public_blocks`
    public_blocks: Count = 0
    source: Name = ""  # a worker that has the blocks; "": vaults
    heat: float = 0.0  # requests of about the last half hour


@dataclass(frozen=True, slots=True)
class PreloadRequest:
    """A worker that is about to be ready asks for at most `blocks` blocks to preload."""

    worker: Name
    model: Name
    model_revision: Name
    block_size: Count
    blocks: Count
    leaving: bool = False  # it drains, and asks for the blocks that only it has, to keep them in vaults


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """Hottest first."""

    placement: Name
    chains: Annotated[tuple[HotChain, ...], MaxLength(4096)] = ()


@dataclass(frozen=True, slots=True)
class VictimRequest:
    """Asks which worker of a model (default: of any) is the cheapest to lose."""

    model: Name = ""


@dataclass(frozen=True, slots=True)
class VictimCost:
    """The loss if a worker goes."""

    worker: Name
    seconds: Seconds  # to compute its unique hot blocks again
    unique_blocks: Count  # that no other worker holds
    unique_hot_blocks: Count  # of them, those in demand
    requests: Count  # waiting and running


@dataclass(frozen=True, slots=True)
class VictimReport:
    """Cheapest first."""

    placement: Name
    workers: tuple[VictimCost, ...] = ()
