"""How a transcript becomes events for one reader: what a format has to write, and which of it is new. Pure."""

from __future__ import annotations

from typing import Protocol

from kvfleet.ingress.runs.event_ids import EventIds, Position, past_the_end
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Finished, Started


class Form(Protocol):
    """How one request's answer is written: the same for all its readers. `size`: what it keeps, bytes of memory."""

    @property
    def size(self) -> int: ...

    def writer(self, at: Position, *, id_lines: bool) -> EventWriter:
        """For a reader who is there; `id_lines`: it asks for `id:` lines. Raises InvalidRequest for a position that
        this answer cannot have."""


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


class EventReader:
    """One reader's place in a transcript: what its client has is in the writer's ids. Pure."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._started = False
        self._ends = 0

    def advance(self, transcript: Transcript, out: list[bytes]) -> None:
        """Everything that is new, but the end of the whole."""
        writer = self._writer
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
        self._writer.ids.check_reached(transcript.totals)
        self.advance(transcript, out)
        last: list[bytes] = []
        self._writer.finished(transcript.finished, transcript, last)
        if self._writer.ids.skipped_ends > len(last):
            raise past_the_end()
        out += last[self._writer.ids.skipped_ends :]
