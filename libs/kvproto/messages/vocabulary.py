"""Types and enumerations that messages share, and the bounds that the codec checks when it reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MaxLength:
    """Most characters, bytes or items."""

    limit: int


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids: packed u32 little-endian on the wire, a plain list for producers and in JSON."""

    max_items: int


Tokens32 = Annotated[tuple[int, ...], Ids(max_items=4_194_304)]  # token ids, packed u32le on the wire
MAX_NAME_CHARS = 256
Name = Annotated[str, MaxLength(MAX_NAME_CHARS)]  # ids, roles, model names
Text = Annotated[str, MaxLength(8_388_608)]
File = Annotated[str, MaxLength(67_108_864)]  # a tokenizer.json may have tens of megabytes
Addresses = Annotated[tuple[Annotated[str, MaxLength(256)], ...], MaxLength(8)]  # unix:PATH, tcp:HOST:PORT
Count = Annotated[int, Range(0, 2**63 - 1)]
U64 = Annotated[int, Range(0, 2**64 - 1)]
Seconds = Annotated[float, Range(0.0, 1e12)]
UnixSeconds = Annotated[int, Range(0, 253_402_300_799)]  # until the year 9999
LogitBias = Annotated[dict[int, float], MaxLength(4096)]  # token id -> added to its logit


class State(StrEnum):
    """A member's state. `dead` is never written: readers show a vanished member so."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Role(StrEnum):
    INGRESS = "ingress"
    PLACEMENT = "placement"
    WORKER = "worker"
    VAULT = "vault"


class Tier(StrEnum):
    """Where a worker gets blocks from, fastest first. `peer` is another worker's device or host. `state` is no place:
    in events it tells the device's blocks behind which a hybrid model's recurrent state is kept."""

    DEVICE = "device"
    HOST = "host"
    VAULT = "vault"
    PEER = "peer"
    STATE = "state"

    @property
    def number(self) -> int:
        """0 is the device."""
        return tuple(Tier).index(self)


class Encoding(StrEnum):
    """Encoding of one request's frames."""

    FRAMES = "frames"  # compact, possibly many sequences in one message
    MSGPACK = "msgpack"  # one map per message, ids as a list: for producers in any language
    JSON = "json"


class WorkerRole(StrEnum):
    """Which half of a request a worker is for, while there are workers for the other half."""

    BOTH = "both"
    PREFILL = "prefill"  # prompts, which go on elsewhere after their first token
    DECODE = "decode"  # what comes after, and prompts that are not worth the move


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Overflow(StrEnum):
    """Treatment of a request that exceeds the model's context."""

    ERROR = "error"  # refused
    TRUNCATE_LEFT = "truncate_left"  # the oldest prompt tokens are dropped until prompt and `max_tokens` fit
    TRUNCATE_GENERATION = "truncate_generation"  # `max_tokens` is cut to the rest of the context
    SLIDING = "sliding"  # whenever the context is full, its older half is dropped


class EarlyStopping(StrEnum):
    """When a beam search ends that has as many finished sequences as beams; named as in transformers."""

    FALSE = "false"  # once no beam can better the worst of them by ending at its present length
    TRUE = "true"  # at once
    NEVER = "never"  # once no beam can better it at any length


class GrammarForm(StrEnum):
    """How a grammar's text says what the output may be."""

    JSON_OBJECT = "json_object"  # any; no text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of strings
    LARK = "lark"


class FormatType(StrEnum):
    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


class ResponseStatus(StrEnum):
    """Of a stored response; all but the first are ends."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AdminCommand(StrEnum):
    DRAIN = "drain"
    STATS = "stats"
    INSPECT = "inspect"
    BUNDLE = "bundle"
    READ_KV = "read_kv"
    ERASE = "erase"  # blocks that only this token sequence has, from device, host and vaults
    LOAD_ADAPTER = "load_adapter"
    UNLOAD_ADAPTER = "unload_adapter"
