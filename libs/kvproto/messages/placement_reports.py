"""What placement answers about its decisions, and what it advises. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvproto.codec_types import MaxLength
from kvproto.messages.vocabulary import Count, Name, Seconds, Text


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
