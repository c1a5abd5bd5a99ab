"""Puts one request's frames in order, across attempts. Pure.

Every token is delivered once: frames of another attempt are dropped (fenced), repeats are cut off, and frames after a
gap wait until the missing ones have been sent again. `Started` comes first, whatever NATS lost; `Finished` is held back
until all tokens it counts are here.

    index   0 1 2 3 4 5 6            next_index = 4
    have    x x x x . w w            w waits; missing() = 4
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvproto.messages import Failed, Finished, Frame, Moved, Started, Tokens

MAX_WAITING = 4096  # frames kept behind a gap; more are dropped and asked for again


@dataclass(slots=True)
class StreamAssembly:
    """State of one choice of one request. `ids` and `chars` are what a next attempt needs to go on."""

    attempt: int = 0
    ids: list[int] = field(default_factory=list)
    chars: int = 0
    started: Started | None = None
    terminal: Finished | Failed | Moved | None = None
    fenced: int = 0
    _waiting: dict[int, Tokens] = field(default_factory=dict)
    _held: Finished | Failed | Moved | None = None

    @property
    def next_index(self) -> int:
        return len(self.ids)

    def begin(self, attempt: int) -> None:
        """A new attempt: whatever an older one still sends is fenced off."""
        self.attempt = attempt
        self._waiting.clear()
        self._held = None
        self.terminal = None

    def accept(self, frame: Frame) -> list[Frame]:
        """Take one frame; return what can be delivered now, in order (often just this frame, often nothing)."""
        if frame.attempt != self.attempt or self.terminal is not None:
            self.fenced += 1
            return []
        if type(frame) is Tokens:
            return self._tokens(frame)
        if isinstance(frame, Started):
            if self.started is not None and self.started.attempt == frame.attempt:
                return []
            first = self.started is None
            self.started = frame
            return self._release(self._ripen([frame])) if first else []
        if isinstance(frame, Finished | Failed | Moved):
            self._held = frame
            return self._release([])
        return []

    def missing(self) -> int | None:
        """The index to have sent again, if something later has arrived; else None."""
        if self._waiting or (self._held is not None and self._counts_more(self._held)):
            return self.next_index
        return None

    def _counts_more(self, frame: Finished | Failed | Moved) -> bool:
        # A failed or moved attempt ends anyway: what it had not delivered is generated again.
        return isinstance(frame, Finished) and (self.started is None or frame.output_tokens > self.next_index)

    def _tokens(self, frame: Tokens) -> list[Frame]:
        if frame.index > self.next_index or self.started is None:
            if len(self._waiting) < MAX_WAITING:
                known = self._waiting.get(frame.index)
                if known is None or len(known.ids) < len(frame.ids):
                    self._waiting[frame.index] = frame
            return []
        out: list[Frame] = []
        self._deliver(frame, out)
        return self._release(self._ripen(out))

    def _ripen(self, out: list[Frame]) -> list[Frame]:
        while self._waiting and (later := self._ripe()) is not None:
            self._deliver(later, out)
        return out

    def _ripe(self) -> Tokens | None:
        frame = self._waiting.pop(self.next_index, None)
        if frame is not None:
            return frame
        for index in [i for i in self._waiting if i < self.next_index]:  # overlaps of repeated frames
            return self._waiting.pop(index)
        return None

    def _deliver(self, frame: Tokens, out: list[Frame]) -> None:
        known = self.next_index - frame.index
        if known:
            if known >= len(frame.ids):
                return
            frame = replace(frame, index=self.next_index, ids=frame.ids[known:], text=frame.text[known:])
        self.ids.extend(frame.ids)
        for piece in frame.text:
            self.chars += len(piece)
        out.append(frame)

    def _release(self, out: list[Frame]) -> list[Frame]:
        if self._held is not None and not self._counts_more(self._held):
            self.terminal, self._held = self._held, None
            out.append(self.terminal)
        return out
