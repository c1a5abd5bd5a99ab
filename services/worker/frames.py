"""Frames of running requests, and of finished ones for a while, so that lost ones can be sent again. Pure.

accepted ──▶ running (tokens collect) ──terminal──▶ finished ──30 s──▶ forgotten
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvproto.messages import (
    Encoding,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    Moved,
    Progress,
    Started,
    Tier,
    Tokens,
)
from services.worker.outputs import SequenceFailed, SequenceFinished, SequenceOutput, SequenceStarted

KEEP_FINISHED_S = 30.0
PAUSED_LIMIT_S = 90.0  # a client gives its reader up after 60
TOKENS_PER_RESEND = 2048

Key = tuple[str, int]


@dataclass(slots=True)
class Record:
    """One attempt's frames. `first_index` is the generated index of `ids[0]`: a continued attempt starts later."""

    request: str
    attempt: int
    inbox: str
    encoding: Encoding
    watcher_reply: str | None
    first_index: int
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    started: Started | None = None
    terminal: Finished | Failed | Moved | None = None
    finished_at: float = 0.0
    deadline: float = float("inf")  # of the event loop's clock
    paused_at: float | None = None

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.ids)


class FrameBook:
    """Owned by the worker's event loop. One record per attempt; exactly one terminal frame each."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._records: dict[Key, Record] = {}
        self._finished: OrderedDict[Key, None] = OrderedDict()
        self._running: dict[Key, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def running(self) -> list[Record]:
        return list(self._running.values())

    @property
    def running_count(self) -> int:
        return len(self._running)

    def find(self, request: str, attempt: int) -> Record | None:
        """A running attempt."""
        return self._running.get((request, attempt))

    def knows(self, request: str, attempt: int) -> bool:
        return (request, attempt) in self._records

    def attempts(self, request: str) -> list[int]:
        """Running attempts of a request."""
        return [attempt for name, attempt in self._running if name == request]

    def open(self, request: GenerateRequest, reply: str) -> Record:
        record = Record(
            request.request,
            request.attempt,
            request.inbox,
            request.encoding,
            reply if request.watcher else None,
            len(request.output_ids),
        )
        self._records[request.request, request.attempt] = record
        self._running[request.request, request.attempt] = record
        return record

    def add(self, output: SequenceOutput, now: float) -> tuple[Record, Frame] | None:
        """The frame to send for one output of the engine; None for an attempt that has already ended."""
        record = self._records.get((output.request, output.attempt))
        if record is None or record.terminal is not None:
            return None
        if isinstance(output, SequenceStarted):
            # A continued attempt may find its own earlier output cached as well: of the prompt it is at most all.
            hit = min(output.cached_tokens, output.prompt_tokens)
            cached = {Tier.DEVICE.value: hit} if hit else {}
            record.started = Started(
                output.request, output.attempt, self._worker, output.prompt_tokens, cached, output.queue_seconds
            )
            return record, record.started
        if isinstance(output, SequenceFinished):
            finished = Finished(
                output.request,
                output.attempt,
                output.reason,
                output.prompt_tokens,
                output.output_tokens,
                min(output.cached_tokens, output.prompt_tokens),
                self._worker,
            )
            return self.end(record, finished, now)
        if isinstance(output, SequenceFailed):
            error = output.error
            failed = Failed(
                output.request,
                output.attempt,
                error.code,
                error.message,
                error.retryable,
                error.field,
                record.next_index,
            )
            return self.end(record, failed, now)
        record.ids.extend(output.ids)
        record.text.extend(output.text)
        return record, Tokens(output.request, output.attempt, 0, output.index, output.ids, output.text)

    def end(self, record: Record, terminal: Finished | Failed | Moved, now: float) -> tuple[Record, Frame]:
        """Close an attempt with its one terminal frame."""
        record.terminal, record.finished_at = terminal, now
        self._finished[record.request, record.attempt] = None
        self._running.pop((record.request, record.attempt), None)
        return record, terminal

    def repeat(self, request: str, attempt: int, from_index: int) -> list[Frame]:
        """Everything from `from_index` on, and how far the attempt is. Empty for an unknown attempt."""
        record = self._records.get((request, attempt))
        if record is None:
            return []
        frames: list[Frame] = [Progress(request, attempt, record.next_index)]
        if record.started is not None:
            frames.append(record.started)
        skip = max(0, from_index - record.first_index)
        for start in range(skip, len(record.ids), TOKENS_PER_RESEND):
            part = slice(start, start + TOKENS_PER_RESEND)
            ids, text = tuple(record.ids[part]), tuple(record.text[part])
            frames.append(Tokens(request, attempt, 0, record.first_index + start, ids, text))
        if record.terminal is not None:
            frames.append(record.terminal)
        return frames

    def overdue(self, now: float) -> list[Record]:
        """Running attempts past their deadline, or paused for so long that nobody will ever let them go on."""
        return [
            record
            for record in self._running.values()
            if now > record.deadline or (record.paused_at is not None and now - record.paused_at > PAUSED_LIMIT_S)
        ]

    def sweep(self, now: float) -> None:
        """Forget what finished more than 30 s ago."""
        while self._finished:
            key = next(iter(self._finished))
            if now - self._records[key].finished_at < KEEP_FINISHED_S:
                return
            del self._finished[key]
            del self._records[key]
