"""What a worker tells placement: changes of its blocks, milestones, and requests that it hands over. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from kvproto.codec_types import MaxLength
from kvproto.messages.requests import GenerateRequest
from kvproto.messages.vocabulary import U64, Count, Name, Seconds, Tier


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
