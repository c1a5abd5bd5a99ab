"""What ingresses share: sessions, and the usage of keys. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvproto.messages.admin import Strays
from kvproto.messages.vocabulary import Count, MaxLength, Name, Range, Seconds


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
