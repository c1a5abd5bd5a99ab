"""What the core is told (events) and what it wants done (actions; the loop decides nothing). Pure data: no bytes, no
clock.

requesters ──PlaceAsked, GenerateAsked──▶ ┐
workers ──Worker…, Milestones───────────▶ │
workers, vaults ──Heartbeat─────────────▶ ├─▶ PlacementCore.handle(event, now) ─▶ actions
draining ones ──CapsuleHeard────────────▶ │
replicas ──BookedBatch, WatchesHeard────▶ │
the clock ──Tick──▶                       ┘

Blocks, snapshots and vaults that come and go call for no action: the loop tells the core's index of them directly. A
Heartbeat, Milestones and a BookedBatch are events as they come. A Capsule and a BookedBatch are actions too: as this
replica goes another one looks for a successor; the others hear what was booked, refused and referred to other regions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.placement.index.kv_indexer import PullSnapshot
from kvproto.errors import KvfleetError
from kvproto.messages import (
    BookedBatch,
    CancelRequest,
    Capsule,
    Chat,
    Decision,
    Encoding,
    Failed,
    Frame,
    GenerateRequest,
    Heartbeat,
    Milestones,
    Placement,
    PlaceRequest,
    ProducerRequest,
    ResendRequest,
    ReturnExpected,
    Watches,
    WorkerRecord,
)


@dataclass(frozen=True, slots=True)
class PlaceAsked:
    reply: str
    tenant: str  # of the subject
    ask: PlaceRequest
    from_other_region: bool = False


@dataclass(frozen=True, slots=True)
class GenerateAsked:
    """A bare producer's request, validated. `request` and `seed` are the producer's or freshly drawn."""

    inbox: str
    encoding: Encoding
    tenant: str
    model_token: str  # of the subject, for a producer that names no model in its body
    request: str
    seed: int
    unix_ms: int  # of its arrival, for expiry on other machines
    ask: ProducerRequest
    from_other_region: bool = False
    chat: Chat | None = None


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker wrote its record: it joined, restarted under its id, or is still alive, maybe in a new state.
    `record.state` is the state as known now; `heartbeat` is the last one heard, for a worker that joins."""

    record: WorkerRecord
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """The server closed a worker's connection: a suspicion, which a ping checks."""

    worker: str


@dataclass(frozen=True, slots=True)
class PingUnanswered:
    """`nobody_listens` leaves no doubt; silence alone may be a worker that is busy for a moment."""

    worker: str
    nobody_listens: bool


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A frame on the inbox of a forwarded request: an answer to an offer, or the notice of its end."""

    frame: Frame
    key: str = ""  # of its reader; "": the first one


@dataclass(frozen=True, slots=True)
class NobodyListens:
    """The server's 503 for one offer to the reader `key`."""

    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CapsuleHeard:
    """A draining worker lets go of a bare producer's request, and waits at `reply` until a replica takes it."""

    reply: str
    capsule: Capsule


@dataclass(frozen=True, slots=True)
class WatchesHeard:
    """A replica that goes asks another one to go on watching; it waits at `reply`."""

    watches: Watches
    reply: str = ""


@dataclass(frozen=True, slots=True)
class ReturnHeard:
    """A worker was told when a conversation is likely to go on."""

    worker: str
    said: ReturnExpected


@dataclass(frozen=True, slots=True)
class Tick:
    """`disconnected`: this process is cut off from NATS or just back, so that others' silence says nothing."""

    disconnected: bool = False


Event = (
    PlaceAsked | GenerateAsked | WorkerRegistered | WorkerLeft | WorkerDisconnected | PingUnanswered | WorkerAnswered
    | NobodyListens | CapsuleHeard | WatchesHeard | ReturnHeard | Heartbeat | Milestones | BookedBatch | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    reply: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class AnswerOtherRegion:
    """A worker of another region may have to fetch from `placement.source`, which needs its addresses; "": none."""

    reply: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class PassOn:
    """A bare producer's request to another region's placement, which answers to its inbox. If that one does not take it
    in time, it comes back as an event from another region: it goes nowhere else."""

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
    """Offer a bare producer's request to one worker, which answers at `reply`."""

    worker: str
    tenant: str
    request: GenerateRequest
    reply: str


@dataclass(frozen=True, slots=True)
class Cancel:
    worker: str
    cancel: CancelRequest


@dataclass(frozen=True, slots=True)
class TellReturn:
    """A bare producer's turn has ended, and its conversation is likely to go on."""

    worker: str
    said: ReturnExpected


@dataclass(frozen=True, slots=True)
class TakenOver:
    """To the worker or replica that let go of something: it has an owner."""

    reply: str


@dataclass(frozen=True, slots=True)
class AskStillRunning:
    """A request has been silent for long: its terminal notice may have been lost."""

    worker: str
    question: ResendRequest


@dataclass(frozen=True, slots=True)
class PingWorker:
    """Silence comes back as PingUnanswered."""

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
    | TellReturn | DropMember | PullSnapshot | Capsule | BookedBatch | RecordDecision
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
