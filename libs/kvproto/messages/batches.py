"""Work that may wait: files, batches, the requests of their lines and of producers, and what came of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from kvproto.messages.vocabulary import Count, MaxLength, Name, Range, Text, UnixSeconds

LineId = Annotated[str, MaxLength(512)]


class BatchStatus(StrEnum):
    """As OpenAI's. The last four are ends."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class FileHead:
    """A stored file, whose bytes are in chunks of whole lines. Until it is `ready` it only reserves its room."""

    file: Name
    name: Text
    bytes: Count
    created_unix: UnixSeconds
    ready: bool = False
    chunks: Count = 0
    expires_unix: UnixSeconds = 0  # 0: with its bucket's age


@dataclass(frozen=True, slots=True)
class BatchFault:
    """Why a batch cannot begin; `line` counts from 1, 0: the whole file."""

    code: Name
    message: Text
    line: Count = 0
    field: Name = ""


@dataclass(frozen=True, slots=True)
class BatchHead:
    """A batch. Written by compare-and-set only. `ingress` leads it: reads its input, queues its lines, counts results;
    "": none does just now."""

    batch: Name
    caller: Name
    input_file: Name
    endpoint: Name
    window: Name
    created_unix: UnixSeconds
    expires_unix: UnixSeconds
    status: BatchStatus = BatchStatus.VALIDATING
    ingress: Name = ""
    metadata: Annotated[dict[str, str], MaxLength(16)] = field(default_factory=dict)
    total: Count = 0
    queued: Count = 0  # lines that were put into the queue, the first ones
    completed: Count = 0
    failed: Count = 0
    result_bytes: Count = 0
    started_unix: UnixSeconds = 0
    cancelling_unix: UnixSeconds = 0
    ended_unix: UnixSeconds = 0
    faults: Annotated[tuple[BatchFault, ...], MaxLength(100)] = ()
    no_output: bool = False  # its file of answers was deleted
    no_errors: bool = False
    takeovers: Count = 0


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A message of the queue: one request that may wait. `body` is what `url` takes over HTTP. Producers put theirs on
    `kvf.batch.<tenant>.<model>`; lines of batches, which name it, come on `.line` after that."""

    request: Name
    body: dict[str, Any] = field(default_factory=dict)
    url: Name = "/v1/chat/completions"
    expires_unix: UnixSeconds = 0  # 0: with the queue's age
    batch: Name = ""
    line: Count = 0
    custom_id: LineId = ""
    caller: Name = ""
    cancel: bool = False  # it is not wanted any more: unless it has ended, its result says so


@dataclass(frozen=True, slots=True)
class QueuedResult:
    """What came of one request, written once: an HTTP status and body, or the code and message of an error that is of
    the queue's own (expired, cancelled)."""

    request: Name
    ended_unix: UnixSeconds
    status: Annotated[int, Range(0, 599)] = 0
    body: Annotated[str, MaxLength(1_048_576)] = ""
    code: Name = ""
    message: Text = ""
    custom_id: LineId = ""

    @property
    def is_good(self) -> bool:
        return self.status == 200
