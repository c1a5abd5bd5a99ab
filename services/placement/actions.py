"""What the core wants done; the loop does it and decides nothing. Pure data.

A Capsule is an action as it is: another replica is to look for a successor, as this one goes. So is a BookedBatch: the
others are told what was booked, what had to be refused, and what other regions were asked to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.placement.events import GenerateAsked
from kvfleet.placement.index.kv_indexer import PullSnapshot
from kvproto.errors import KvfleetError
from kvproto.messages import (
    BookedBatch,
    CancelRequest,
    Capsule,
    Decision,
    Encoding,
    Failed,
    GenerateRequest,
    Placement,
    ResendRequest,
)


@dataclass(frozen=True, slots=True)
class Answer:
    reply: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class AnswerOtherRegion:
    """The same where a worker of another region may have to fetch from `placement.source`, which needs its addresses:
    "" for nobody."""

    reply: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class PassOn:
    """A bare producer's request to another region's placement, which answers to its inbox. What that one does not take
    in time is asked for here again, as if it had come from elsewhere: it goes nowhere else."""

    region: str
    model: str
    event: GenerateAsked


@dataclass(frozen=True, slots=True)
class Fail:
    """A terminal failure, in the encoding that its reader speaks."""

    inbox: str
    failed: Failed
    encoding: Encoding = Encoding.FRAMES


@dataclass(frozen=True, slots=True)
class Forward:
    """Offer a bare producer's request to one worker, whose answer is due at `reply`."""

    worker: str
    tenant: str
    request: GenerateRequest
    reply: str


@dataclass(frozen=True, slots=True)
class Cancel:
    worker: str
    cancel: CancelRequest


@dataclass(frozen=True, slots=True)
class TakenOver:
    """To the worker or replica that let go of something: it has an owner."""

    reply: str


@dataclass(frozen=True, slots=True)
class AskStillRunning:
    """Ask a worker about a request that has been silent for long: its terminal notice may have been lost."""

    worker: str
    question: ResendRequest


@dataclass(frozen=True, slots=True)
class PingWorker:
    """Ask a suspected worker for a sign of life; silence comes back as PingUnanswered."""

    worker: str


@dataclass(frozen=True, slots=True)
class DropMember:
    """Delete a dead worker's record, so that every watcher acts now."""

    worker: str


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """A decision whose request has ended, with the prompt's block hashes back to back: a line for a ledger's file."""

    decision: Decision
    hashes: bytes
    block_size: int


Action = (
    Answer | AnswerOtherRegion | PassOn | Fail | Forward | Cancel | TakenOver | AskStillRunning | PingWorker
    | DropMember | PullSnapshot | Capsule | BookedBatch | RecordDecision
)  # fmt: skip


def failed_frame(error: KvfleetError, request: str = "", attempt: int = 0) -> Failed:
    """The frame that stands for `error` on the wire; texts are cut to what readers accept."""
    return Failed(
        request=request[:256],
        attempt=attempt,
        code=error.code,
        message=error.message[:2000],
        retryable=error.retryable,
        field=error.field[:256] if error.field else None,
        retry_after_s=error.retry_after_s,
    )
