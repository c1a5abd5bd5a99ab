"""What happens to placement, as the pure core is told it. Pure data: no bytes, no clock.

requesters ──PlaceAsked, GenerateAsked──▶ ┐
workers ──Worker…, Milestones───────────▶ │
workers, vaults ──Vault…, Heartbeat,      │
          BlocksChanged──────────────────▶├─▶ PlacementCore.handle(event, now) ─▶ actions
draining ones ──CapsuleHeard────────────▶ │
replicas ──BookedBatch, WatchesHeard────▶ │
the clock ──Tick──▶                       ┘

A Heartbeat, Milestones and a BookedBatch are events as they come.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.placement.index.changes import Changes
from kvproto.messages import (
    BookedBatch,
    Capsule,
    Encoding,
    Frame,
    Heartbeat,
    Milestones,
    PlaceRequest,
    ProducerRequest,
    Watches,
    WorkerRecord,
)


@dataclass(frozen=True, slots=True)
class PlaceAsked:
    """Somebody wants to know a worker; the answer goes to `reply`. `tenant` is the subject's."""

    reply: str
    tenant: str
    ask: PlaceRequest
    from_other_region: bool = False  # which has nobody for it


@dataclass(frozen=True, slots=True)
class GenerateAsked:
    """A bare producer's request, already validated. `request` and `seed` are the producer's or freshly drawn;
    `model_token` is the subject's, for a producer that names no model in its body; `unix_ms` is when it arrived, for
    expiry on other machines."""

    inbox: str
    encoding: Encoding
    tenant: str
    model_token: str
    request: str
    seed: int
    unix_ms: int
    ask: ProducerRequest
    from_other_region: bool = False


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is alive that was not; `record.state` is its state as known now."""

    record: WorkerRecord
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True)
class WorkerUpdated:
    """A living worker wrote its record again: a sign of life, maybe a new state."""

    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerNewEpoch:
    """A worker restarted under its id: what its former life was doing is lost."""

    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """The server closed a worker's connection: suspicion, to be checked by a ping."""

    worker: str


@dataclass(frozen=True, slots=True)
class PingUnanswered:
    """A suspected worker did not answer a ping. `nobody_listens` leaves no doubt; silence alone may be a worker that
    is busy for a moment."""

    worker: str
    nobody_listens: bool


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A frame on the inbox of a forwarded request: an answer to an offer, or the notice of its end. `key` is of the
    reader that it is about; "": the first one."""

    frame: Frame
    key: str = ""


@dataclass(frozen=True, slots=True)
class NobodyListens:
    """The server's 503 for one offer to the reader `key`."""

    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class VaultJoined:
    """A vault is alive, in this life of it; told again it changes nothing."""

    vault: str
    epoch: str


@dataclass(frozen=True, slots=True)
class VaultLeft:
    vault: str


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    worker: str
    changes: Changes


@dataclass(frozen=True, slots=True)
class CapsuleHeard:
    """A draining worker lets go of a bare producer's request, and waits at `reply` for somebody to take it."""

    reply: str
    capsule: Capsule


@dataclass(frozen=True, slots=True)
class WatchesHeard:
    """A replica that goes asks another one to go on watching."""

    watches: Watches
    reply: str = ""  # of the one who waits to hear that they are


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `disconnected`: this process is cut off from NATS or just back, so that silence says nothing of
    others."""

    disconnected: bool = False


Event = (
    PlaceAsked | GenerateAsked | WorkerJoined | WorkerUpdated | WorkerNewEpoch | WorkerLeft | WorkerDisconnected
    | PingUnanswered | WorkerAnswered | NobodyListens | VaultJoined | VaultLeft | BlocksChanged | CapsuleHeard
    | WatchesHeard | Heartbeat | Milestones | BookedBatch | Tick
)  # fmt: skip
