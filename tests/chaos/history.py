"""What a chaos run has seen: requests as their clients saw them, and faults as they happened. Plain values.

Times are seconds of the harness's monotonic clock since the run began, so that requests and faults can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tests.chaos.schedule import Fault


class Transport(StrEnum):
    CLIENT = "client"  # kvproto.Client
    CHAT = "chat"  # POST /v1/chat/completions
    COMPLETIONS = "completions"  # POST /v1/completions
    GENERATE = "generate"  # POST /generate, a turn of a session
    BACKGROUND = "background"  # POST /v1/responses, which nobody waits for
    BARE_MSGPACK = "bare msgpack"
    BARE_JSON = "bare JSON"

    @property
    def is_http(self) -> bool:
        return self in (Transport.CHAT, Transport.COMPLETIONS, Transport.GENERATE, Transport.BACKGROUND)

    @property
    def is_bare(self) -> bool:
        return self in (Transport.BARE_MSGPACK, Transport.BARE_JSON)


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived at once of one choice. `index`: of its first token; None where the transport does not say."""

    at: float
    choice: int
    text: str
    ids: tuple[int, ...] = ()
    index: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """A terminal event as it arrived: `finished`, or an error with its code."""

    at: float
    code: str = "finished"
    message: str = ""
    retryable: bool = False
    output_tokens: int | None = None


@dataclass(slots=True)
class Exchange:
    """One request of a client, over as many connections as it took. Owned by the client that makes it."""

    number: int
    transport: Transport
    case: str
    model: str
    tenant: str
    behaviour: str
    began: float
    turn: int = 0
    request: str = ""  # its id, as far as the client learned it
    accepted_at: float | None = None
    pieces: list[Piece] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)  # choice -> why it ended
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    after_end: int = 0  # events that came after the terminal one
    late: list[str] = field(default_factory=list)  # what they were, as far as it is known
    cached_tokens: int | None = None
    workers: list[tuple[float, str]] = field(default_factory=list)  # who served it, from when
    ingresses: list[tuple[float, str]] = field(default_factory=list)
    refusals: list[tuple[float, str]] = field(default_factory=list)  # before it was accepted: tried again
    broken: list[tuple[float, str]] = field(default_factory=list)  # connections that broke under an accepted stream
    resumed: int = 0
    left_at: float | None = None  # the client went for good, on purpose
    done_at: float | None = None

    @property
    def until(self) -> float:
        return self.done_at if self.done_at is not None else float("inf")

    def text_of(self, choice: int) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)

    def ids_of(self, choice: int) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces if piece.choice == choice for token in piece.ids)

    def worker_at(self, at: float) -> str | None:
        found = None
        for since, worker in self.workers:
            if since <= at or found is None:
                found = worker
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request without faults got: per choice. `ids` is empty where the transport does not say."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    reasons: tuple[str, ...]
    logprobs: tuple[tuple[float, ...], ...] = ()
    output_tokens: int | None = None


@dataclass(slots=True)
class Happened:
    """A fault as it was carried out. `over_at`: nothing is done to anybody any more; `well_at`: all are back."""

    fault: Fault
    began: float
    over_at: float | None = None
    well_at: float | None = None
    note: str = ""

    @property
    def until(self) -> float:
        return self.well_at if self.well_at is not None else float("inf")


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process that ended. `asked`: how it was told to (`kill`, `drain`), or empty."""

    at: float
    name: str
    code: int
    asked: str
    took_s: float = 0.0
    said: str = ""  # the end of its log


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that is still held when nothing runs any more."""

    where: str
    what: str


@dataclass(slots=True)
class History:
    """All of a run."""

    answers: dict[tuple[str, int], Answer] = field(default_factory=dict)  # (case, turn)
    exchanges: list[Exchange] = field(default_factory=list)
    faults: list[Happened] = field(default_factory=list)
    ends: list[ProcessEnd] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    crossed: list[str] = field(default_factory=list)  # canaries of one tenant that another one's cache answered
    unwell: list[str] = field(default_factory=list)  # who did not come back after a fault
    counts: dict[str, int] = field(default_factory=dict)
