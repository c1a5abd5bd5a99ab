"""What is known of one attempt: its readers, how far each choice is, how it ended. Pure; the frame book's.

Readers' subscriptions lease a request. About once a second a message to an inbox has a reply subject, where NATS
reports that nothing subscribes to the inbox. If no frames are due, an empty batch does for it; plain readers get no
such batch, so one that is gone is noticed with its first frame.

    listens ──nobody there──▶ unheard ──for 2.5 s, told several times──▶ gone: its requests end here
       ▲                          │
       └──a message was taken─────┴── this worker's own connection is new: others are still on their way back
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvchat.message_builder import MessageBuilder
from kvproto.block_hash import Root
from kvproto.errors import KvfleetError
from kvproto.messages import (
    AssistantDelta,
    AssistantMessage,
    ChoiceFinished,
    Encoding,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    Moved,
    Started,
    TokenLogprobs,
    Tokens,
)

if TYPE_CHECKING:  # it reads the clock, and this file is pure
    from kvfleet.worker.streams.request_trace import AttemptTrace

RECEIPT_PERIOD_S = 0.9  # below a second, whatever the beat that asks
AGAIN_S = 0.4  # the period of an unheard inbox
NOTICE_S = 0.3  # by then NATS would have sent a notice
GONE_S = 2.5  # a client that lost its server is back by then
GONE_NOTICES = 3

MOVED = "moved"

Terminal = Finished | Failed | Moved


@dataclass(frozen=True, slots=True)
class Reader:
    inbox: str
    encoding: Encoding

    @property
    def reads_batches(self) -> bool:
        return self.encoding is Encoding.FRAMES


@dataclass(slots=True)
class _Lease:
    inbox: str
    number: int  # in the reply subject
    batches: bool  # a batch without frames may be sent
    attempts: int = 0
    asked_at: float = -1e9
    noticed_at: float = -1e9
    unheard_since: float | None = None
    notices: int = 0

    def period_s(self) -> float:
        return RECEIPT_PERIOD_S if self.unheard_since is None else AGAIN_S

    def is_gone(self, now: float) -> bool:
        if self.unheard_since is None or self.notices < GONE_NOTICES:
            return False
        return now - self.unheard_since >= GONE_S and self.noticed_at >= self.asked_at  # the last was not taken either


@dataclass(eq=False)
class Leases:
    """One lease per inbox, held by the attempts that are read there."""

    _leases: dict[str, _Lease] = field(default_factory=dict)
    _by_number: dict[int, _Lease] = field(default_factory=dict)
    _numbers: int = 0

    def hold(self, reader: Reader) -> None:
        lease = self._leases.get(reader.inbox)
        if lease is None:
            self._numbers += 1
            lease = _Lease(reader.inbox, self._numbers, batches=True)
            self._leases[reader.inbox] = self._by_number[lease.number] = lease
        lease.batches = lease.batches and reader.reads_batches
        lease.attempts += 1

    def release(self, reader: Reader) -> None:
        lease = self._leases[reader.inbox]
        lease.attempts -= 1
        if not lease.attempts:
            del self._leases[reader.inbox], self._by_number[lease.number]

    def receipt(self, subject: str, now: float) -> int | None:
        """The number by which a message to `subject` asks for a receipt now; None if it does not."""
        lease = self._leases.get(subject)
        if lease is None or now - lease.asked_at < lease.period_s():
            return None
        if lease.noticed_at < lease.asked_at <= now - NOTICE_S:
            lease.unheard_since, lease.notices = None, 0
        lease.asked_at = now
        return lease.number

    def due(self, now: float) -> list[str]:
        """Inboxes that should get an empty batch."""
        return [
            lease.inbox for lease in self._leases.values() if lease.batches and now - lease.asked_at >= lease.period_s()
        ]

    def on_notice(self, number: int, now: float) -> None:
        """NATS found no subscriber for this number's message."""
        lease = self._by_number.get(number)
        if lease is None:
            return
        lease.noticed_at = now
        lease.notices += 1
        if lease.unheard_since is None:
            lease.unheard_since = now

    def gone(self, now: float, *, steady: bool) -> list[str]:
        """Inboxes unheard for long enough. No notice counts unless this worker's own connection is `steady`."""
        if not steady:
            for lease in self._leases.values():
                lease.unheard_since, lease.notices = None, 0
            return []
        return [lease.inbox for lease in self._leases.values() if lease.is_gone(now)]


@dataclass(slots=True)
class Track:
    """One choice's tokens. `before`: those that earlier attempts had generated."""

    before: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # none, or one per id
    deltas: list[AssistantDelta] = field(default_factory=list)  # the same
    builder: MessageBuilder | None = None  # of a chat's message, until the attempt has ended
    ended: ChoiceFinished | None = None

    @property
    def first_index(self) -> int:
        """The generated index of `ids[0]`."""
        return len(self.before)

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.ids)

    @property
    def weight(self) -> int:
        """Its size in tokens."""
        return len(self.before) + len(self.ids) + len(self.deltas) + weight_of(self.logprobs)

    def take(self, tokens: Tokens) -> Tokens:
        """The same, with what they add to a chat's message."""
        if (builder := self.builder) is not None:
            tokens = replace(tokens, deltas=tuple(map(builder.read, tokens.text)))
        self.ids.extend(tokens.ids)
        self.text.extend(tokens.text)
        self.logprobs.extend(tokens.logprobs)
        self.deltas.extend(tokens.deltas)
        return tokens

    def end(self, ended: ChoiceFinished) -> ChoiceFinished:
        """The same, with a chat's message."""
        if (builder := self.builder) is not None and ended.message is None:
            ended = replace(ended, message=builder.end(ended.reason))
        self.ended = ended
        return ended


def weight_of(logprobs: Iterable[TokenLogprobs]) -> int:
    return sum(1 + len(scored.top_ids) for scored in logprobs)


@dataclass(slots=True)
class AttemptRecord:
    """`pending` are the choices that the engine is to generate. `scores` are those of the prompt's tokens from number
    `first_scored` on, above 1 in a continued attempt."""

    request: str
    attempt: int
    readers: list[Reader]  # one at least; the last one stays until the end
    watchers: list[str]  # inboxes of placements that want to see a bare producer's request end
    tracks: list[Track]
    pending: set[int]
    tenant: str
    asked: GenerateRequest | None  # until it has ended
    content: bytes  # digest of what was asked for
    accepted_at: float
    root: Root = b""
    prompt_ids: tuple[int, ...] = ()
    first_scored: int = 1
    scores: list[TokenLogprobs] = field(default_factory=list)
    has_spoken: bool = False  # its first token has come
    started: Started | None = None
    terminal: Terminal | None = None
    finished_at: float = 0.0
    weight: int = 0  # in tokens, once it has ended
    deadline: float = float("inf")  # of the event loop's clock
    paused_at: float | None = None
    paused_by: set[str] = field(default_factory=set)  # inboxes; "" is all of them
    is_left: bool = False  # by its last reader: the engine is to cancel it
    is_offered: bool = False  # to a placement, as it is: what the engine still makes of it is its successor's to say
    trace: AttemptTrace | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.attempt

    @property
    def scored(self) -> int:
        """Leading tokens of the prompt that need no scores any more."""
        return self.first_scored + len(self.scores)

    @property
    def chains(self) -> list[tuple[int, ...]]:
        """The tokens of each choice, with the prompt's."""
        return [(*self.prompt_ids, *track.before, *track.ids) for track in self.tracks]

    @property
    def ends(self) -> list[ChoiceFinished]:
        return [track.ended for track in self.tracks if track.ended is not None]

    @property
    def output_tokens(self) -> int:
        """Of all choices and earlier attempts."""
        return sum(track.next_index for track in self.tracks)

    @property
    def code(self) -> str | None:
        """Why it ended; None if all was generated."""
        return MOVED if isinstance(self.terminal, Moved) else getattr(self.terminal, "code", None)

    def failed(self, error: KvfleetError) -> Failed:
        return failure(self.request, self.attempt, error, self.output_tokens)

    def is_of(self, tenant: str | None) -> bool:
        return tenant is None or tenant == self.tenant

    def is_read_at(self, inbox: str) -> bool:
        return any(reader.inbox == inbox for reader in self.readers)

    @property
    def wants_pause(self) -> bool:
        return "" in self.paused_by or all(reader.inbox in self.paused_by for reader in self.readers)


def failure(request: str, attempt: int, error: KvfleetError, output_tokens: int = 0) -> Failed:
    what = error.code, error.message, error.retryable, error.field
    return Failed(request, attempt, *what, output_tokens, error.retry_after_s)


def without_message(frame: Frame) -> Frame:
    """The same, without what it says of a chat's message."""
    if isinstance(frame, ChoiceFinished | Finished) and frame.message is not None:
        return replace(frame, message=AssistantMessage(frame.message.finish_reason, partial=True))
    return replace(frame, deltas=()) if isinstance(frame, Tokens) else frame


def tracks_of(request: GenerateRequest, builders: Sequence[MessageBuilder] = ()) -> tuple[list[Track], set[int]]:
    """All choices, and the numbers of those that have not ended. `builders`: of a chat's messages."""
    tracks: list[Track] = []
    for choice in range(request.sampling.n):
        before = request.continuation(choice)
        track = Track(before.output_ids, builder=builders[choice] if builders else None)
        if before.finished is not None:
            track.end(ChoiceFinished(request.request, request.attempt, choice, before.finished, track.next_index))
        tracks.append(track)
    return tracks, {choice for choice, track in enumerate(tracks) if track.ended is None}
