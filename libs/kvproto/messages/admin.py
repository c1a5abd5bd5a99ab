"""Questions of ingresses and operators to one worker, and its answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvproto.messages.members import Heartbeat, WorkerRecord
from kvproto.messages.vocabulary import AdminCommand, Count, File, MaxLength, Name, Text, Tokens32


@dataclass(frozen=True, slots=True)
class Stray:
    """Token ids that were computed after the first `start` of a history, and are no part of it."""

    start: Count
    ids: Tokens32


Strays = Annotated[tuple[Stray, ...], MaxLength(256)]


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """A command on a worker's admin subject, answered part by part. `inspect`, `read_kv` and `erase` name tenant and
    ids, `erase` also strays. Ids that exceed one message come in earlier ones of the same `question`."""

    command: AdminCommand
    tenant: Name = ""
    ids: Tokens32 = ()
    layer: Count = 0
    part: Count = 0
    question: Name = ""
    ids_before: Count = 0  # ids in earlier messages of this question
    more_ids: bool = False  # more messages of this question follow
    keep: Count = 0  # leading ids that `erase` leaves alone
    strays: Strays = ()
    model: Name = ""  # whose blocks, or the adapter to load or to unload; "": the worker's own
    path: Annotated[str, MaxLength(4096)] = ""  # of the adapter to load, as the worker's engine sees it


@dataclass(frozen=True, slots=True)
class AdminReply:
    """The requested part of an answer; `data` of all parts, joined, is the answer. An error has `code` set."""

    part: Count = 0
    parts: Count = 1
    data: Annotated[bytes, MaxLength(1_000_000)] = b""
    digest: Name = ""
    code: Name | None = None
    message: Text = ""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Asks a fleet of one machine for so many workers of a model (default: of its only one)."""

    workers: Count
    model: Name = ""


@dataclass(frozen=True, slots=True)
class ScaleReply:
    """Workers of the model that it had. An error has `code` set."""

    model: Name
    workers: Count = 0
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
    """A model's tokenizer, template and defaults, for ingresses, which have no model files."""

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
    tool_format: Name = ""  # how it writes tool calls; "": as its template says
    public_prefixes: tuple[Tokens32, ...] = ()  # shared by all tenants: whole blocks of registered system prompts
    response_schema: Text = ""  # of its tokenizer, as JSON: transformers' response_template, or response_schema
