"""What is known of one attempt: who reads it, how far each of its choices is, how it ended. Pure; the frame book's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfleet.worker.streams.milestones import Course
from kvfleet.worker.streams.readers import Reader
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Failed, Finished, GenerateRequest, Moved, Started, TokenLogprobs

if TYPE_CHECKING:
    from kvfleet.worker.streams.request_trace import AttemptTrace


@dataclass(slots=True)
class Track:
    """One choice's tokens. `first_index` is the generated index of `ids[0]`: a continued attempt starts later."""

    first_index: int
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # none, or one per id
    ended: ChoiceFinished | None = None

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.ids)

    @property
    def weight(self) -> int:
        """What it takes to keep, in tokens."""
        return len(self.ids) + sum(1 + len(scored.top_ids) for scored in self.logprobs)


@dataclass(slots=True)
class AttemptRecord:
    """One attempt's frames. `pending` are the choices that the engine is to generate, or go on with."""

    request: str
    attempt: int
    readers: list[Reader]  # one at least; the last one stays until the end
    watchers: list[str]  # who wants to see it end: placements, for bare producers
    course: Course
    tracks: list[Track]
    pending: set[int]
    tenant: str
    asked: GenerateRequest | None  # until it has ended
    content: bytes  # digest of what was asked for
    started: Started | None = None
    terminal: Finished | Failed | Moved | None = None
    finished_at: float = 0.0
    deadline: float = float("inf")  # of the event loop's clock
    paused_at: float | None = None
    paused_by: set[str] = field(default_factory=set)  # inboxes; "" is all of them
    is_left: bool = False  # by its last reader: the engine was told to cancel it
    trace: AttemptTrace | None = None

    @property
    def output_tokens(self) -> int:
        """Of all choices together, those of earlier attempts included."""
        return sum(track.next_index for track in self.tracks)

    def failed(self, error: KvfleetError) -> Failed:
        """The terminal frame that says so."""
        what = error.code, error.message, error.retryable, error.field
        return Failed(self.request, self.attempt, *what, self.output_tokens, error.retry_after_s)

    def is_of(self, tenant: str | None) -> bool:
        """None: the asker may ask for any tenant."""
        return tenant is None or tenant == self.tenant

    def is_read_at(self, inbox: str) -> bool:
        return any(reader.inbox == inbox for reader in self.readers)

    @property
    def wants_pause(self) -> bool:
        """Whether no reader wants more for now."""
        return "" in self.paused_by or all(reader.inbox in self.paused_by for reader in self.readers)


def tracks_of(request: GenerateRequest) -> tuple[list[Track], set[int]]:
    """Where each choice begins, and which of them are to be generated: those that have not ended."""
    tracks: list[Track] = []
    for choice in range(request.sampling.n):
        before = request.continuation(choice)
        count = len(before.output_ids)
        track = Track(count)
        if before.finished is not None:
            track.ended = ChoiceFinished(request.request, request.attempt, choice, before.finished, count)
        tracks.append(track)
    return tracks, {choice for choice, track in enumerate(tracks) if track.ended is None}
