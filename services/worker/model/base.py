"""The seam between the engine and whatever computes. Knows no torch, so that a fake runner needs none."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from kvfleet.worker.schedule.sequence import Sequence as Work
from kvfleet.worker.schedule.step_plan import Slice
from kvsampling.draw import Ran


class StepAborted(Exception):
    """Every sequence of the step is cancelled. Only the engine catches it."""


class Abort:
    """Cancels that the engine has not obeyed yet, to give up a forward pass early.

    The engine obeys a cancel between two steps, and a step with a long prompt takes a second. So the runner calls
    `check` between any two layers. A pass that ends there commits nothing: it wrote only behind the last computed token
    of its sequences. `ask` is for any thread, all else for the thread that runs steps.
    """

    def __init__(self) -> None:
        self._asked: set[tuple[str, int]] = set()
        self._sequences: Sequence[Work] = ()

    def ask(self, request: str, attempt: int) -> None:
        self._asked.add((request, attempt))

    def obeyed(self, request: str, attempt: int) -> None:
        self._asked.discard((request, attempt))

    def begin(self, sequences: Sequence[Work]) -> None:
        self._sequences = sequences

    def end(self) -> None:
        self._sequences = ()

    def check(self) -> None:
        """Raises StepAborted if every sequence of the step is cancelled; nearly free while no cancel is pending."""
        if self._asked and self._sequences and all(one.key[:2] in self._asked for one in self._sequences):
            raise StepAborted


# Copies of many blocks, made as it is iterated: each number says how many more are done, in the order they were given.
# A 0 says that all before it was waiting for steps. Once it is closed, from any thread, no copy is under way.
Copies = Generator[int, None, None]


class BlockFormat(Protocol):
    kv_format: bytes  # 16: equal where blocks' bytes mean the same (`kvproto.dataplane.block`)
    rows: tuple[int, int, str]  # of a block: how many, of how many numbers, and their dtype; int8: each has a scale


class PieceMemory(Protocol):
    """Pieces of a pool, by number, as bytes: blocks, or recurrent states. From any thread, beside steps: a reader
    ensures that the piece is complete and stays, a writer that it alone holds it."""

    block_bytes: int

    def read(self, block: int, target: memoryview) -> None: ...

    def write(self, block: int, source: memoryview) -> None: ...

    def read_blocks(self, blocks: Sequence[int], host: memoryview, slots: Sequence[int]) -> Copies:
        """Copy blocks to `slots` of `host`, pieces of `block_bytes`; no slot comes twice."""
        for block, slot in zip(blocks, slots, strict=True):
            self.read(block, host[slot * self.block_bytes : (slot + 1) * self.block_bytes])
            yield 1

    def write_blocks(self, blocks: Sequence[int], host: memoryview, slots: Sequence[int]) -> Copies:
        """Copy `slots` of `host` to blocks; no block comes twice."""
        for block, slot in zip(blocks, slots, strict=True):
            self.write(block, host[slot * self.block_bytes : (slot + 1) * self.block_bytes])
            yield 1


class StatePieces(PieceMemory, Protocol):
    """Recurrent states. `kv_format`: 16 bytes, equal where theirs mean the same."""

    kv_format: bytes


class BlockMemory(BlockFormat, PieceMemory, Protocol):
    """The bytes of a KV pool's blocks."""

    def host_memory(self, size: int) -> memoryview:
        """Zero bytes on the host, to copy blocks to and from. Raises MemoryError."""

    def view(self, block: int) -> memoryview | None:
        """The block itself, writable; None where the host cannot address it."""

    def landed(self, blocks: Sequence[int]) -> None:
        """These were written, also through `view`. Called by the thread that runs steps, before it uses them."""


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
    state_memory: StatePieces | None  # the states' bytes, by slot, if it has any
    num_states: int  # slots for recurrent states; 0: the model has none
    window: int | None  # tokens, itself included, that a token sees in the layer that sees furthest; None: all of them
    eos_ids: tuple[int, ...]  # tokens with which the model ends a text
    memory: BlockMemory
    tolerance: float  # the most that a `difference` between blocks of two different batches is due to rounding
    overlaps: bool  # whether `run` calls `meanwhile`, once its device computes by itself
    meanwhile: Callable[[], None]

    def run(self, slices: Sequence[Slice]) -> list[Ran]:
        """One forward pass: store KV of all slices' tokens in their blocks, score and draw where a slice says so.

        A slice attends to all tokens before it in its own blocks and to nothing else. One result per slice, in order.
        Running the same slices again gives the same blocks. Recurrent states and snapshots are written once the pass
        has ended well. Raises OutOfMemory if the pass does not fit, and StepAborted where `abort.check` does; the slots
        of the slices' tokens are then undefined.
        """

    def take_device_seconds(self) -> float | None:
        """How long the device was busy with the passes since it was last asked; None where nobody measures that."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in the given order."""

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole recurrent states (source slot, target slot) in the given order; source -1: none."""

    def difference(self, block: int, other: int) -> float:
        """Largest difference between two blocks' numbers, as a share of the largest number in them."""

    def read_kv(self, blocks: Sequence[int], tokens: int, layer: int) -> tuple[Any, Any]:
        """K and V `[tokens, kv_heads, head_dim]` of the first `tokens` tokens in `blocks`, copied."""


def host_memory(size: int) -> memoryview:
    """`size` zero bytes, on huge pages where the system has them, taken when first touched. Raises MemoryError."""
    try:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
