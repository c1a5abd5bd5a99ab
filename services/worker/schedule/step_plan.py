"""What one forward pass does: which tokens of which sequences, in which blocks. Plain values, made by the scheduler.

A Slice never changes; freezing it would cost three times as much.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from kvfleet.worker.schedule.sequence import Sequence
from kvproto.errors import KvfleetError
from kvsampling.draw import Draw


@dataclass(slots=True)
class Scoring:
    """Score the tokens `ids`, which are at positions from `first` on: each by the logits of the one before it."""

    first: int
    ids: Items[int]
    alternatives: int

    def between(self, start: int, end: int) -> Scoring | None:
        """Those that tokens at positions `start` ... `end - 1` score."""
        first, last = max(self.first, start + 1), min(self.first + len(self.ids), end + 1)
        ids = self.ids[first - self.first : last - self.first]
        return Scoring(first, ids, self.alternatives) if first < last else None


@dataclass(slots=True)
class Slice:
    """One sequence's part of a step: run tokens `ids` at positions `start` ... `start + len(ids) - 1`. Token p lives in
    slot p % block_size of `blocks[p // block_size]`, -1 where no layer reaches the block any more. `draw` is None
    where more of the prompt follows, or nothing is to be drawn. A recurrent state is that of the tokens before
    `start`, and becomes that of all."""

    ids: Items[int]
    start: int
    blocks: Items[int]
    draw: Draw | None
    scoring: Scoring | None = None
    state: int = -1  # slot of the sequence's recurrent state; -1: the model has none
    snapshots: Items[tuple[int, int]] = ()  # tokens before it and slot: the state there goes to that slot as well

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def halves(self) -> tuple[Slice, Slice]:
        middle = len(self.ids) // 2

        def part(ids: Items[int], start: int, draw: Draw | None) -> Slice:
            scoring = self.scoring and self.scoring.between(start, start + len(ids))
            taken = [(at, slot) for at, slot in self.snapshots if start < at <= start + len(ids)]
            return replace(self, ids=ids, start=start, draw=draw, scoring=scoring, snapshots=taken)

        return part(self.ids[:middle], self.start, None), part(self.ids[middle:], self.start + middle, self.draw)


@dataclass(slots=True)
class StepPlan:
    """`copies` (source block, target block) happen first, in this order."""

    slices: list[Slice] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # whose slice it is, same order
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # also (slots; source -1: none)
    started: list[Sequence] = field(default_factory=list)  # scheduled for the first time
    failed: list[tuple[Sequence, KvfleetError]] = field(default_factory=list)
    decodes: int = 0  # the first so many slices: sequences that run on their one last token

    @property
    def prefill(self) -> tuple[int, float]:
        """How many tokens are not decodes, and the sum of their positions."""
        parts = [(len(part.ids), part.start) for part in self.slices[self.decodes :]]
        return sum(count for count, _ in parts), sum(count * (start + (count - 1) / 2) for count, start in parts)

    def drop(self, at: int) -> Sequence:
        del self.slices[at]
        self.decodes -= at < self.decodes
        return self.sequences.pop(at)
