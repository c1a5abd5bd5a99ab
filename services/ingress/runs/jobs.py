"""What a request is to its run, once it was read and tokenised: its turn, and how each reader has its answer written.
Pure: what a turn holds, and the formats of events, are others'.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfleet.ingress.limits.admission import STREAMED, TokenCosts
from kvfleet.ingress.limits.service_levels import ServiceLevel
from kvfleet.ingress.runs.event_ids import EventIds, Position, past_the_end
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.client import Generation
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Continuation, Finished, Started
from kvproto.streams.stream import Stream

PROMPT_TOKEN_BYTES = 48
BIAS_BYTES = 96


class Form(Protocol):
    """How one request's answer is written: the same for all its readers. `size`: what it keeps, bytes of memory."""

    @property
    def size(self) -> int: ...

    def writer(self, at: Position, *, id_lines: bool) -> EventWriter:
        """For a reader; `id_lines`: it wants `id:` lines. Raises InvalidRequest for a position that cannot be."""


class EventWriter(Protocol):
    """One format of events for one reader: appends ready bytes to `out`.

    `tokens` writes those of a choice from `begin` on. `choice_finished` is called only where there are several.
    `started` leaves out what the reader has; `finished` does not.
    """

    ids: EventIds

    def started(self, started: Started, out: list[bytes]) -> None: ...
    def tokens(self, choice: int, said: ChoiceTranscript, begin: int, out: list[bytes]) -> None: ...
    def choice_finished(self, ended: ChoiceFinished, out: list[bytes]) -> None: ...
    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None: ...
    def failed(self, error: KvfleetError) -> bytes: ...


@dataclass(eq=False, slots=True)
class EventReader:
    """One reader's place in a transcript: what its client has is in the writer's ids."""

    writer: EventWriter
    _started: bool = False
    _ends: int = 0

    def advance(self, transcript: Transcript, out: list[bytes]) -> None:
        """Everything that is new, but the end of the whole."""
        writer = self.writer
        if not self._started:
            if transcript.started is None:
                return
            self._started = True
            writer.started(transcript.started, out)
        counts = writer.ids.counts
        for at, said in enumerate(transcript.choices):
            begin, total = counts[at], len(said.ids)
            if begin < total:
                writer.tokens(at, said, begin, out)
                counts[at] = total
        while self._ends < len(transcript.ends):
            ended = transcript.ends[self._ends]
            self._ends += 1
            if ended.choice not in writer.ids.ended:
                writer.choice_finished(ended, out)

    def finish(self, transcript: Transcript, out: list[bytes]) -> None:
        """All that is left of a finished one. Raises InvalidRequest for a client that claims more than there is."""
        assert transcript.finished is not None
        ids = self.writer.ids
        ids.check_reached(transcript.totals)
        self.advance(transcript, out)
        last: list[bytes] = []
        self.writer.finished(transcript.finished, transcript, last)
        if ids.skipped_ends > len(last):
            raise past_the_end()
        out += last[ids.skipped_ends :]


class HeldTurn:
    """What a request holds while it runs, and what is kept when it has ended. A completion's: nothing."""

    async def open(self) -> None:
        """Before the stream starts, each time. Raises KvfleetError."""

    async def commit(self, transcript: Transcript) -> None:
        """The stream has finished. Raises KvfleetError."""

    async def abandon(self, transcript: Transcript) -> None:
        """The stream was cut. Never raises."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was read and tokenised: all that is left is to run it. `form` is how its answer is written,
    `turn_bytes` the memory that its turn keeps besides the prompt's ids, `level` where the gaps between its tokens are
    counted, `costs` what each of its tokens takes."""

    generation: Generation
    form: Form
    turn: HeldTurn
    turn_bytes: int = 0
    level: ServiceLevel | None = None
    costs: TokenCosts = STREAMED

    @property
    def size(self) -> int:
        """Bytes of memory, about, without the form's."""
        said, ids = self.generation.sampling, len(self.generation.prompt_ids)
        asked = sum(map(len, said.stop)) + BIAS_BYTES * (len(said.logit_bias) + len(said.stop_ids))
        return self.turn_bytes + PROMPT_TOKEN_BYTES * ids + asked


Prepare = Callable[[], Awaitable[Job]]
Start = Callable[[Generation, Sequence[Continuation]], Stream]
