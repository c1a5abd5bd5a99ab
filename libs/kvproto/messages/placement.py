"""What placement replicas tell one another, also those of other regions, and what they answer about their
decisions and advise. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvproto.messages.members import WorkerRecord
from kvproto.messages.vocabulary import Count, Encoding, MaxLength, Name, Range, Seconds, Text


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
