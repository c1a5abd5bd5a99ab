"""What one forward pass does: which tokens of which sequences, in which blocks. Plain values, made by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from kvproto.errors import KvfleetError
from kvproto.messages import Sampling
from services.worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the next token: its random number depends on (sampling.seed, choice, index) alone.

    `prompt_ids` and `output_ids` are what came before, for penalties; `banned` must not be drawn. All three are empty
    where the request asks for nothing that needs them.
    """

    sampling: Sampling
    choice: int
    index: int
    prompt_ids: Items[int] = ()
    output_ids: Items[int] = ()
    banned: Items[int] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step: run tokens `ids` at positions `start` ... `start + len(ids) - 1`.

    `blocks` is the block table, at least up to the last position; token p lives in slot p % block_size of
    `blocks[p // block_size]`. An entry is -1 where no layer can reach the block any more (sliding windows). `draw` is
    None where more of the prompt is still to come.
    """

    ids: Items[int]
    start: int
    blocks: Items[int]
    draw: Draw | None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(slots=True)
class StepPlan:
    """One step. `copies` (source block, target block) happen first, one after the other, in this order."""

    slices: list[Slice] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # whose slice it is, same order
    copies: list[tuple[int, int]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)  # scheduled for the first time
    failed: list[tuple[Sequence, KvfleetError]] = field(default_factory=list)
    prefill_tokens: int = 0

    @property
    def fed_tokens(self) -> int:
        return sum(len(part.ids) for part in self.slices)
