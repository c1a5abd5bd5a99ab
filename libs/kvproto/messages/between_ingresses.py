"""State that ingresses share: sessions, responses, and the usage of keys. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvproto.messages.admin import Strays
from kvproto.messages.requests import Sampling
from kvproto.messages.vocabulary import Count, MaxLength, Name, Range, ResponseStatus, Seconds, Text, Tokens32


@dataclass(frozen=True, slots=True)
class Turn:
    """The one running turn of a session, leased so that a dead ingress does not lock it for ever."""

    request: Name
    ingress: Name
    expires_unix_ms: Count


@dataclass(frozen=True, slots=True)
class SessionHead:
    """Head of a session, whose token ids are in chunks of 4,096 u32. Written by compare-and-set only."""

    seq_id: Annotated[str, MaxLength(1024)]
    model: Name
    length: Count  # committed token ids
    turns: Count
    created_unix_ms: Count
    updated_unix_ms: Count
    worker: Name = ""  # where the last turn ran
    turn: Turn | None = None
    generation: Name = ""  # which set of chunks is current
    last_request: Name = ""  # of the turn that was committed last
    last_start: Count = 0  # where that turn's prompt begins: a repeat of the turn starts there
    left_request: Name = ""  # of the turn that was cut since then
    regions: Annotated[tuple[Name, ...], MaxLength(256)] = ()  # other regions where turns ran
    strays: Count = 0  # token ids that its requests computed beside the history


@dataclass(frozen=True, slots=True)
class SessionStrays:
    """Token ids that requests of a session computed beside its history: cut turns, abandoned choices."""

    chains: Strays


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """In the record itself, or in so many chunks, named by a generation."""

    inline: Annotated[bytes, MaxLength(1_048_576)] = b""
    generation: Name = ""
    chunks: Count = 0


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A stored response. Written by compare-and-set, and no more once it has ended. `asked` is a `ResponseAsked`,
    `said` are the frames Started, Tokens and Finished."""

    request: Name
    model: Name
    status: ResponseStatus
    created_unix: Count
    asked: StoredBytes
    said: StoredBytes | None = None
    background: bool = False
    previous: Annotated[tuple[Name, ...], MaxLength(4096)] = ()  # requests of the responses before it, oldest first
    ended_unix: Count = 0
    code: Name = ""  # of the error that ended it
    message: Text = ""
    regions: Annotated[tuple[Name, ...], MaxLength(256)] = ()  # other regions where it ran


@dataclass(frozen=True, slots=True)
class ResponseAsked:
    """What a response was asked for, and how its text is to be read, whatever model is served later."""

    body: Annotated[bytes, MaxLength(67_108_864)]  # JSON
    sampling: Sampling
    conversation: Name = ""
    format: Name = ""  # of its calls
    thinks: bool = False
    own: Text = ""  # its tokenizer's format
    prompt_end: Text = ""  # which may have the message's beginning
    prompt_ids: Tokens32 = ()  # while it runs in the background


@dataclass(frozen=True, slots=True)
class ActiveResponse:
    """A response that runs in the background, and the ingress that sees to it; "": none does just now."""

    tenant: Name
    request: Name
    ingress: Name
    caller: Name
    priority: Annotated[int, Range(-100, 100)] = 0
    takeovers: Count = 0


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """An ingress's count of what one caller, or all callers of a tenant, use of their limits.

    Counts only grow within a `life` of the account at that ingress, and so does the life's number: a report replaces
    all earlier ones. `lacking_*` is that ingress's view of all ingresses together.
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
    lacking_requests: Annotated[float, Range(0.0, 1e18)] = 0.0  # until its bucket is full
    lacking_tokens: Annotated[float, Range(0.0, 1e18)] = 0.0
    lacking_day_tokens: Count = 0
    requests_per_minute: Annotated[float, Range(0.0, 1e18)] = 0.0  # its limits, for ingresses that do not know them
    tokens_per_minute: Annotated[float, Range(0.0, 1e18)] = 0.0
    tokens_per_day: Count = 0
    ended: bool = False  # this life is over: later reports of this name are of another one


@dataclass(frozen=True, slots=True)
class UsageReport:
    """One ingress's report to the others of its region, on `kvf.ingress.usage`; `seq` grows within its epoch."""

    ingress: Name
    epoch: Name
    seq: Count
    accounts: Annotated[tuple[AccountUsage, ...], MaxLength(4096)]
