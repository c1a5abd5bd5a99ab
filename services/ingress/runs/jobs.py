"""Jobs: a tokenised request as its run sees it, with its turn and the writers of its readers. Pure."""

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
from kvproto.messages import ChoiceFinished, Continuation, Finished
from kvproto.streams.stream import Stream

PROMPT_TOKEN_BYTES = 48
BIAS_BYTES = 96


class Form(Protocol):
    """The format of one request's answer, for all its readers. `size`: bytes of memory that it keeps."""

    @property
    def size(self) -> int: ...

    def writer(self, at: Position, *, id_lines: bool) -> EventWriter:
        """Raises InvalidRequest for a position that this answer cannot have."""


class EventWriter(Protocol):
    """Appends one reader's events to `out` as bytes. `tokens` writes a choice from `begin` on; `choice_finished` is
    called only for several choices. `started`, once the prompt's scores are there, leaves out what the reader has;
    `finished` does not."""

    ids: EventIds

    def started(self, transcript: Transcript, out: list[bytes]) -> None: ...
    def tokens(self, choice: int, said: ChoiceTranscript, begin: int, out: list[bytes]) -> None: ...
    def choice_finished(self, ended: ChoiceFinished, said: ChoiceTranscript, out: list[bytes]) -> None: ...
    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None: ...
    def failed(self, error: KvfleetError) -> bytes: ...


@dataclass(eq=False, slots=True)
class EventReader:
    """One reader's place in a transcript; the writer's ids count its client's tokens."""

    writer: EventWriter
    _started: bool = False
    _ends: int = 0

    def advance(self, transcript: Transcript, out: list[bytes]) -> None:
        """Writes all that is new, but the answer's end."""
        writer = self.writer
        if not self._started:
            if not transcript.is_open:
                return
            self._started = True
            writer.started(transcript, out)
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
                writer.choice_finished(ended, transcript.choices[ended.choice], out)

    def finish(self, transcript: Transcript, out: list[bytes]) -> None:
        """Writes the rest. Raises InvalidRequest for a client that claims more than there is."""
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
    """What a request holds while it runs, and keeps when it has ended. A completion: nothing."""

    async def open(self) -> None:
        """Before the stream starts, each time. Raises KvfleetError."""

    async def commit(self, transcript: Transcript) -> None:
        """The stream has finished. Raises KvfleetError."""

    async def abandon(self, transcript: Transcript) -> None:
        """The stream was cut. Never raises."""


@dataclass(frozen=True, slots=True)
class Job:
    """A tokenised request. `turn_bytes` of memory its turn keeps besides the prompt's ids; `level` counts the gaps
    between its tokens."""

    generation: Generation
    form: Form
    turn: HeldTurn
    turn_bytes: int = 0
    level: ServiceLevel | None = None
    costs: TokenCosts = STREAMED

    def transcript(self) -> Transcript:
        """An empty one."""
        said = self.generation.sampling
        scores = 0 if said.prompt_logprobs is None else len(self.generation.prompt_ids) - 1
        return Transcript.of(said.n, self.costs, scores)

    @property
    def size(self) -> int:
        """Approximate bytes of memory, without the form's."""
        said, ids = self.generation.sampling, len(self.generation.prompt_ids)
        asked = sum(map(len, said.stop)) + BIAS_BYTES * (len(said.logit_bias) + len(said.stop_ids))
        return self.turn_bytes + PROMPT_TOKEN_BYTES * ids + asked


Prepare = Callable[[], Awaitable[Job]]
Start = Callable[[Generation, Sequence[Continuation]], Stream]
