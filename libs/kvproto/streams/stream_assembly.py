"""Puts one request's frames in order, across attempts. Pure.

Delivers each token once: drops frames of other attempts (fenced), cuts off repeats, and holds back frames after a gap.
`Started` comes first; `Finished` waits until all tokens it counts are here, and so does `Moved`, until `settle`. Each
choice is in order by itself:

    choice 0   0 1 2 3 4 5 6         next_index = 4
    have       x x x x . w w         w waits; missing() = (4, 2)
    choice 1   0 1                   next_index = 2
    have       x x E                 E: it has ended, also for later attempts

Where the prompt's scores are asked for, they come after `Started` and before all tokens, which wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvproto.messages import (
    ChoiceFinished,
    Continuation,
    Failed,
    Finished,
    Frame,
    Moved,
    PromptScores,
    Started,
    Tokens,
)

MAX_WAITING = 4096  # frames after a gap; more are dropped and asked for again


@dataclass(slots=True)
class ChoiceText:
    """The delivered part of one choice."""

    ids: list[int] = field(default_factory=list)
    chars: int = 0
    ended: ChoiceFinished | None = None  # only where there are several choices


class StreamAssembly:
    """State of one request with `n` choices. `scored` leading tokens of the prompt need no more scores, the first among
    them; 0: `scores` of none are wanted."""

    __slots__ = (
        "_ends", "_held", "_is_open", "_scores", "_waiting", "attempt", "choices", "fenced", "scored", "started",
        "terminal",
    )  # fmt: skip

    def __init__(self, n: int = 1, *, scores: bool = False) -> None:
        self.attempt = 0
        self.scored = int(scores)
        self._scores: dict[int, PromptScores] = {}  # waiting, by index
        self._is_open = False  # what comes after the prompt can be delivered
        self.choices = [ChoiceText() for _ in range(n)]
        self.started: Started | None = None
        self.terminal: Finished | Failed | Moved | None = None
        self.fenced = 0
        self._waiting: dict[tuple[int, int], Tokens] = {}  # (choice, index)
        self._ends: dict[int, ChoiceFinished] = {}  # held back
        self._held: Finished | Failed | Moved | None = None

    @property
    def ids(self) -> list[int]:
        """Of the first choice."""
        return self.choices[0].ids

    @property
    def next_indices(self) -> tuple[int, ...]:
        """By choice."""
        return tuple(len(choice.ids) for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Of all choices together."""
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def is_waiting(self) -> bool:
        """Whether a frame cannot be delivered yet."""
        return bool(self._waiting or self._scores or self._ends or self._held is not None)

    @property
    def has_begun(self) -> bool:
        """Whether anything is here that another attempt goes on after."""
        return self.scored > 1 or any(choice.ids for choice in self.choices)

    @property
    def reusable(self) -> int | None:
        """Leading tokens of the prompt whose cached blocks help the next attempt; None: all, no score is missing."""
        return self.scored - 1 if self.scored and not self._is_open else None

    def continuations(self) -> tuple[Continuation, ...]:
        """Of the next attempt's choices; () for one choice, or where nothing was delivered."""
        if len(self.choices) == 1 or not any(choice.ids or choice.ended for choice in self.choices):
            return ()
        return tuple(
            Continuation(tuple(choice.ids), choice.chars, choice.ended.reason if choice.ended else None)
            for choice in self.choices
        )

    def resume(self, before: Sequence[Continuation], scored: int = 0) -> None:
        """Go on after the caller's tokens, and after the scores of `scored` leading tokens of the prompt."""
        self.scored = max(self.scored, scored) if self.scored else 0
        for at, one in enumerate(before):
            ended = ChoiceFinished("", 0, at, one.finished, len(one.output_ids)) if one.finished else None
            self.choices[at] = ChoiceText(list(one.output_ids), one.text_sent, ended)

    def begin(self, attempt: int) -> None:
        """Fence off frames of older attempts."""
        self.attempt = attempt
        self._waiting.clear()
        self._scores.clear()
        self._ends.clear()
        self._held = None
        self.terminal = None

    def accept(self, frame: Frame) -> list[Frame]:
        """Take one frame; return the frames that can be delivered now, in order."""
        if frame.attempt != self.attempt or self.terminal is not None:
            self.fenced += 1
            return []
        if type(frame) is Tokens:
            return self._tokens(frame)
        if isinstance(frame, Started):
            return self._start(frame)
        if isinstance(frame, PromptScores):
            known = self._scores.get(frame.index)
            if len(self._scores) < MAX_WAITING and (known is None or len(known.logprobs) < len(frame.logprobs)):
                self._scores[frame.index] = frame
            return self._open([])
        if isinstance(frame, ChoiceFinished):
            if not 0 <= frame.choice < len(self.choices) or self.choices[frame.choice].ended is not None:
                return []
            self._ends[frame.choice] = frame
            return self._release([])
        if isinstance(frame, Finished | Failed | Moved):
            self._held = frame
            return self._release([])
        return []

    def missing(self) -> tuple[int, ...] | None:
        """The indices from which frames must be sent again; None if there is no gap."""
        if self._waiting or self._scores or self._ends or (self._held is not None and self._counts_more(self._held)):
            return self.next_indices
        return None

    @property
    def is_moving(self) -> bool:
        """Whether the attempt has moved and some of its tokens are not here yet."""
        return isinstance(self._held, Moved)

    def settle(self) -> None:
        """Missing tokens will not come: the held-back terminal frame counts."""
        self.terminal, self._held = self._held, None

    def _counts_more(self, frame: Finished | Failed | Moved) -> bool:
        if isinstance(frame, Failed):
            return False  # its missing tokens are generated again
        if isinstance(frame, Moved):
            return frame.output_tokens > self.tokens
        if not self._is_open or frame.output_tokens > self.tokens:
            return True
        return len(self.choices) > 1 and any(choice.ended is None for choice in self.choices)

    def _start(self, frame: Started) -> list[Frame]:
        if self.started is not None:
            if self.started.attempt != frame.attempt:
                self.started = frame
            return []
        self.started = frame
        return self._open([frame])

    def _open(self, out: list[Frame]) -> list[Frame]:
        """Deliver the scores that are next; after the last ones, or where none are wanted, what waits for them."""
        if self.started is None:
            return out
        for index in sorted(self._scores):
            if index > self.scored:
                break
            frame = self._scores.pop(index)
            if self.scored and (new := frame.logprobs[self.scored - index :]):
                out.append(replace(frame, index=self.scored, logprobs=new))
                self.scored += len(new)
        self._is_open = not self.scored or self.scored >= self.started.prompt_tokens
        if not self._is_open:
            return out
        for at, choice in enumerate(self.choices):
            self._ripen(at, choice, out)
        return self._release(out)

    def _tokens(self, frame: Tokens) -> list[Frame]:
        at = frame.choice
        if not 0 <= at < len(self.choices) or (choice := self.choices[at]).ended is not None:
            return []
        if frame.index > len(choice.ids) or not self._is_open:
            known = self._waiting.get((at, frame.index))
            if len(self._waiting) < MAX_WAITING and (known is None or len(known.ids) < len(frame.ids)):
                self._waiting[at, frame.index] = frame
            return []
        out: list[Frame] = []
        _deliver(choice, frame, out)
        if self._waiting:
            self._ripen(at, choice, out)
        return self._release(out)

    def _ripen(self, at: int, choice: ChoiceText, out: list[Frame]) -> None:
        """Deliver waiting frames that are next, also overlapping ones."""
        while self._waiting:
            key = at, len(choice.ids)
            if key not in self._waiting:
                key = next((one for one in self._waiting if one[0] == at and one[1] < key[1]), key)
            if (later := self._waiting.pop(key, None)) is None:
                return
            _deliver(choice, later, out)

    def _release(self, out: list[Frame]) -> list[Frame]:
        """Append the ends and the terminal frame whose tokens are all delivered."""
        if self._ends and self._is_open:
            for at in [at for at, end in self._ends.items() if end.output_tokens <= len(self.choices[at].ids)]:
                self.choices[at].ended = end = self._ends.pop(at)
                out.append(end)
        if self._held is not None and not self._counts_more(self._held):
            self.terminal, self._held = self._held, None
            out.append(self.terminal)
        return out


def _deliver(choice: ChoiceText, frame: Tokens, out: list[Frame]) -> None:
    """Append the new part of a frame that continues a choice or overlaps with it."""
    next_index = len(choice.ids)
    known = next_index - frame.index
    if known:
        if known >= len(frame.ids):
            return
        cut = {name: getattr(frame, name)[known:] for name in ("ids", "text", "logprobs", "deltas")}
        frame = replace(frame, index=next_index, **cut)
    choice.ids.extend(frame.ids)
    for piece in frame.text:
        choice.chars += len(piece)
    out.append(frame)
