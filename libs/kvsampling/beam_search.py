"""Which sequences a beam search goes on with, which have finished, and when it is over. Pure.

    beams ─▶ candidates of each ─▶ the best of all, (stop tokens + 1) times as many as beams, twice at least
                                    ├─ one that ends, among the best `width` ─▶ finished: the `width` best so far
                                    └─ the best `width` that do not end ─▶ the next beams: of one beam several, or none

Beams are as long as one another. The rules, `early_stopping` among them, are those of transformers'
`GenerationMixin._beam_search` for one prompt; a token that ends a sequence counts in its length and its score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvproto.messages import Beams, EarlyStopping, FinishReason, TokenLogprobs
from kvsampling.draw import Candidates


class TextWatch(Protocol):
    """A beam's text, as far as stop strings need it."""

    def after(self, token: int) -> TextWatch:
        """One of the same beam with a token more."""
        ...

    @property
    def stopped(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """`score`: the sum of its tokens' log probabilities. Its other tokens are those of `before`."""

    token: int = -1
    score: float = 0.0
    logprobs: TokenLogprobs | None = None
    before: Beam | None = None
    watch: TextWatch | None = None

    def path(self) -> list[Beam]:
        """Of each token, the first one's first."""
        found, beam = [], self
        while beam.before is not None:
            found.append(beam)
            beam = beam.before
        return found[::-1]


class Branch(NamedTuple):
    """A next beam: which of the present ones it continues, and its token."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A finished sequence. `reason` STOP with a stop token as its last, which is no part of the output, or by its text;
    else LENGTH. `score` has the length's penalty."""

    last: Beam
    score: float
    reason: FinishReason
    by_token: bool

    @property
    def output(self) -> list[Beam]:
        path = self.last.path()
        return path[:-1] if self.by_token else path


@dataclass(eq=False, slots=True)
class BeamSearch:
    """Of one prompt. `watch`: of the empty text, where there are stop strings."""

    asked: Beams
    max_tokens: int
    stop_ids: frozenset[int]
    watch: TextWatch | None = None
    running: list[Beam] = field(init=False)
    finished: list[Hypothesis] = field(init=False)  # the best `width`, best first
    length: int = field(init=False)  # tokens of each running beam
    over: bool = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    @property
    def candidates(self) -> int:
        """How many of each beam are needed: the best `width` that do not end are among them, whatever stops."""
        return min(self._considered, 2 * self.asked.width + len(self.stop_ids))

    @property
    def _considered(self) -> int:
        return max(2, 1 + len(self.stop_ids)) * self.asked.width

    def restart(self) -> None:
        self.running, self.finished = [Beam(watch=self.watch)], []
        self.length, self.over = 0, False

    def take(self, found: Sequence[Candidates]) -> list[Branch]:
        """The candidates of each running beam; returns the next ones, best first. None once it is over."""
        width, self.length = self.asked.width, self.length + 1
        best = [
            (self.running[parent].score + score, parent, at)
            for parent, one in enumerate(found)
            for at, score in enumerate(one.scores)
            if score > -math.inf
        ]
        best.sort(key=lambda one: -one[0])
        branches: list[Branch] = []
        beams: list[Beam] = []
        ended: list[Hypothesis] = []
        beside: list[Hypothesis] = []  # that ended behind the best
        for rank, (score, parent, at) in enumerate(best[: self._considered]):
            if rank >= width <= len(beams):
                break
            token, before = found[parent].tokens[at], self.running[parent]
            watch = before.watch.after(token) if before.watch is not None else None
            beam = Beam(token, score, found[parent].logprobs_of(at), before, watch)
            by_token = token in self.stop_ids
            if by_token or self.length >= self.max_tokens or (watch is not None and watch.stopped):
                stopped = by_token or (watch is not None and watch.stopped)
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                end = Hypothesis(beam, score / self.length**self.asked.length_penalty, reason, by_token)
                (ended if rank < width else beside).append(end)
            elif len(beams) < width:
                beams.append(beam)
                branches.append(Branch(parent, token))
        self._finish(ended)
        self.running = beams
        self.over = not beams or (len(self.finished) == width and self._is_settled())
        if self.over and len(self.finished) < width:
            self._finish(beside)
        return [] if self.over else branches

    def _finish(self, ended: list[Hypothesis]) -> None:
        self.finished = sorted([*self.finished, *ended], key=lambda one: -one.score)[: self.asked.width]

    def _is_settled(self) -> bool:
        """With as many finished sequences as beams."""
        asked = self.asked
        if asked.early_stopping is EarlyStopping.TRUE:
            return True
        longest = asked.early_stopping is EarlyStopping.NEVER and asked.length_penalty > 0
        length = self.max_tokens if longest else self.length
        attainable: float = self.running[0].score / length**asked.length_penalty
        return attainable <= self.finished[-1].score
