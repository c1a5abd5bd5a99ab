"""The seam between the engine and whatever computes. Knows no torch, so that a fake runner needs none."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Protocol

from kvfleet.worker.schedule.sequence import Sequence as Work
from kvfleet.worker.schedule.step_plan import Drawn, Slice


class StepAborted(Exception):
    """All that the step was for is cancelled. Caught by the engine, seen by nobody else."""


class Abort:
    """Whether anybody still waits for the forward pass under way: cancels that were asked for and not obeyed yet.

    A cancel is obeyed between two steps, and a step with a long prompt takes a second. So the runner looks here
    between any two layers, and gives the pass up once every sequence of it was cancelled. Nothing of it is committed
    then: what it wrote lies behind the last computed token of its sequences, where nobody reads.

    `ask` is for any thread; all else is for the one that runs steps, which alone compares: nothing races.
    """

    def __init__(self) -> None:
        self._asked: set[tuple[str, int | None]] = set()
        self._sequences: Sequence[Work] = ()

    def ask(self, request: str, attempt: int | None) -> None:
        """An attempt, or all of a request, will be cancelled after this step."""
        self._asked.add((request, attempt))

    def obeyed(self, request: str, attempt: int | None) -> None:
        """It was."""
        self._asked.discard((request, attempt))

    def begin(self, sequences: Sequence[Work]) -> None:
        self._sequences = sequences

    def end(self) -> None:
        self._sequences = ()

    def check(self) -> None:
        """Raises StepAborted if nobody waits any more; costs next to nothing while no cancel is to be obeyed."""
        if self._asked and self._sequences and all(self._is_unwanted(one) for one in self._sequences):
            raise StepAborted

    def _is_unwanted(self, sequence: Work) -> bool:
        request, attempt = sequence.spec.request, sequence.spec.attempt
        return (request, attempt) in self._asked or (request, None) in self._asked


class BlockMemory(Protocol):
    """The bytes of a KV pool's blocks, for those who move whole blocks. From any thread, beside steps: who reads sees
    to it that the block is full and stays, who writes that nobody else has it."""

    block_bytes: int
    kv_format: bytes  # 16: equal where blocks' bytes mean the same (`kvproto.dataplane.block`)
    rows: tuple[int, int, str]  # of a block: how many, of how many numbers, and their dtype; int8: each has a scale

    def host_memory(self, size: int) -> memoryview:
        """Zero bytes on the host that blocks are copied to and from. Raises MemoryError."""

    def view(self, block: int) -> memoryview | None:
        """The block itself, writable; None where the host cannot address it."""

    def read(self, block: int, target: memoryview) -> None:
        """Copy out."""

    def write(self, block: int, source: memoryview) -> None:
        """Copy in; there when it returns."""

    def landed(self, blocks: Sequence[int]) -> None:
        """These were written, by `write` or through `view`. Called by the thread that runs steps, before it uses
        them."""


class ModelRunner(Protocol):
    """A model and its KV pool. Called from one thread."""

    abort: Abort
    device: str  # as torch names it
    vocab_size: int
    context_length: int  # most tokens of one sequence, prompt and outputs together
    num_blocks: int
    block_size: int
    bytes_per_block: int  # K and V of `block_size` tokens for all layers
    num_layers: int
    window: int | None  # tokens, itself included, that a token sees in the layer that sees furthest; None: all of them
    eos_ids: tuple[int, ...]  # tokens with which the model ends a text
    memory: BlockMemory
    tolerance: float  # how much of a `difference` is rounding, where one was computed in another batch than the other

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        """One forward pass: store KV of all slices' tokens in their blocks, draw where a slice says so.

        A slice attends to all tokens before it in its own blocks and to nothing else. One result per slice, in order.
        Running the same slices again gives the same state. Raises OutOfMemory if the pass does not fit, and StepAborted
        between two layers where `abort.check` does: slots of the slices' tokens then hold anything.
        """

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), one after the other in the given order."""

    def difference(self, block: int, other: int) -> float:
        """Largest difference between two blocks' numbers, as a share of the largest number in them."""

    def read_kv(self, blocks: Sequence[int], tokens: int, layer: int) -> tuple[Any, Any]:
        """K and V `[tokens, kv_heads, head_dim]` of the first `tokens` tokens in `blocks`, copied."""


def host_memory(size: int) -> memoryview:
    """Memory for blocks: `size` zero bytes, on huge pages where the system has them; nothing is taken before it is
    touched.

    Raises MemoryError if there is no room for it.
    """
    try:
        pages = mmap.mmap(-1, max(size, 1))
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
