"""Generated ids in, ids with text that may leave the engine out. Pure.

An id is released once no stop string can cut off, and no later id change, the text up to its end. So text never lacks
an id, and another worker can continue from any prefix of the released ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfleet.worker.text.detokenizer import DetokenizerStream
from kvproto.messages import TokenLogprobs


class Released(NamedTuple):
    """`text[i]` and, if any, `logprobs[i]` belong to `ids[i]`."""

    ids: tuple[int, ...]
    text: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()

    def then(self, other: Released) -> Released:
        return Released(self.ids + other.ids, self.text + other.text, self.logprobs + other.logprobs)


NOTHING = Released((), ())
REPLAYED_IDS = 32  # one by one
CHARACTER_IDS = 4  # at most, of UTF-8


class StopStrings:
    """A stop string may span tokens, and no part of it may be sent. Empty strings are ignored."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.strings = tuple(dict.fromkeys(s for s in strings if s))
        self.longest = max(map(len, self.strings), default=0)  # characters

    def find(self, text: str) -> tuple[int, str]:
        """The earliest stop string and where it starts; -1 if there is none."""
        found = [(at, s) for at, s in ((text.find(s), s) for s in self.strings) if at >= 0]
        return min(found, default=(-1, ""), key=lambda one: one[0])

    def held(self, text: str) -> int:
        """Length of the longest end of `text` that more text could turn into a stop string."""
        for length in range(min(self.longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(s.startswith(end) for s in self.strings):
                return length
        return 0


@dataclass(frozen=True, eq=False, slots=True)
class StopWatch:
    """Whether a beam's text has a stop string. `tail`: the end of the text that one may begin in."""

    decoder: DetokenizerStream
    stops: StopStrings
    tail: str = ""
    stopped: bool = False

    def after(self, token: int) -> StopWatch:
        decoder = self.decoder.fork()
        text = self.tail + decoder.push(token)
        watched = self.stops.longest - 1
        return StopWatch(decoder, self.stops, text[-watched:] if watched else "", self.stops.find(text)[0] >= 0)


@dataclass(eq=False, slots=True)
class TextStream:
    """`stop`: the stop string that was found, the text ends before it."""

    decoder: DetokenizerStream
    stops: StopStrings
    stop: str = ""
    next_index: int = 0  # generated index of the next id to leave
    _ids: list[int] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the held ids, if requested
    _known_ids: int = 0  # held ids, from the first on, that the client has
    _known_text: int = 0  # characters of the next pieces that the client has
    _owed: str = ""  # text of known ids that the client lacks: goes with the next id

    def replay(self, ids: Sequence[int], text_sent: int) -> None:
        """Rebuild the state from an earlier attempt's `ids`, which never leave. The client has `text_sent` characters:
        what follows continues exactly there."""
        count, text = self._skip(ids)
        end, self.stop = self.stops.find(text)
        if self.stop:
            text = text[:end]
        elif count and (watched := self.stops.longest - 1) > 0:  # a stop string may begin there
            self._ids.append(ids[count - 1])
            self._pieces.append(text[-watched:])
            text = text[:-watched]
        for token in ids[count:]:
            if self.stop:
                break
            text += "".join(self.push(token).text)
        self.next_index = len(ids)
        self._known_ids = len(self._ids)
        self._known_text = max(text_sent - len(text), 0)
        self._owed = text[text_sent:]

    def _skip(self, ids: Sequence[int]) -> tuple[int, str]:
        """How many leading ids are settled, and their text; the last ones and an unfinished character are not."""
        most = len(ids) - REPLAYED_IDS
        for count in range(most, max(most - CHARACTER_IDS, 0), -1):
            if (text := self.decoder.skip(ids[:count])) is not None:
                return count, text
        return 0, ""

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> Released:
        piece = self.decoder.push(token)
        if not self._ids and not self.stops.longest and not self.decoder.pending:
            return self._give((token,), (piece,), () if logprobs is None else (logprobs,))
        self._ids.append(token)
        self._pieces.append(piece)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        return self._release()

    def finish(self) -> Released:
        """Generation has ended: all held ids leave, up to a stop string that flushed text completes."""
        if self.stop or not self._ids:
            return NOTHING
        self._pieces[-1] += self.decoder.flush()
        self._cut()
        return self._pop(len(self._ids))

    def _release(self) -> Released:
        if self._cut():
            return self._pop(len(self._ids))
        text = "".join(self._pieces)
        safe = len(text) - self.stops.held(text)
        count, end = 0, 0
        for piece in self._pieces[: len(self._pieces) - self.decoder.pending]:
            end += len(piece)
            if end > safe:
                break
            count += 1
        return self._pop(count)

    def _cut(self) -> bool:
        if not self.stops.longest:
            return False
        end, self.stop = self.stops.find("".join(self._pieces))
        if not self.stop:
            return False
        for at, piece in enumerate(self._pieces):
            self._pieces[at] = piece[:end]
            end = max(end - len(piece), 0)
        return True

    def _pop(self, count: int) -> Released:
        if not count:
            return NOTHING
        ids, pieces = tuple(self._ids[:count]), tuple(self._pieces[:count])
        replayed = len(self._ids) - len(self._logprobs) if self._logprobs else 0  # first, and without logprobs
        logprobs = tuple(self._logprobs[: max(count - replayed, 0)])
        del self._ids[:count], self._pieces[:count], self._logprobs[: len(logprobs)]
        return self._give(ids, pieces, logprobs)

    def _give(self, ids: tuple[int, ...], pieces: tuple[str, ...], logprobs: tuple[TokenLogprobs, ...]) -> Released:
        if self._known_ids or self._known_text or self._owed:
            ids, pieces = self._leave_out_known(ids, pieces)
        self.next_index += len(ids)
        return Released(ids, pieces, logprobs)

    def _leave_out_known(
        self, ids: tuple[int, ...], pieces: tuple[str, ...]
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Only for the first releases after a replay."""
        new_ids, new_pieces = [], []
        for token, piece in zip(ids, pieces, strict=True):
            skipped = min(self._known_text, len(piece))
            self._known_text -= skipped
            self._owed += piece[skipped:]
            if self._known_ids:
                self._known_ids -= 1
                continue
            new_ids.append(token)
            new_pieces.append(self._owed)
            self._owed = ""
        return tuple(new_ids), tuple(new_pieces)
