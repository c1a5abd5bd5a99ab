"""Copies between vLLM's blocks and the slots of the shared memory, on one rank. Tensors of any device; imports nothing
of vLLM.

    vLLM's tensor of a layer [blocks, ...] ──▶ row of words [block, word] ◀──▶ [slot, group, layer, word] of the file

Of several cache groups each has its layers in the same rows: a block is of one group, and its number says which bytes.
That of a state may be smaller: what lies behind it is copied as well.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvfleet_vllm.block_moves import SharedStore

log = logging.getLogger(__name__)

STAGED_BYTES = 64 << 20  # gathered on a GPU at once: the bus is crossed once for a block, not once for each layer of it
WORD = torch.int64  # copied as words: torch splits a copy of more elements than 2^15 among threads, which is slower


class LayerBlocks:
    """The bytes of `blocks` blocks in every layer, in the order of their names; a slot has those of `groups` blocks.
    Raises ValueError where a block is not one run of bytes, or layers differ in size."""

    def __init__(self, caches: Mapping[str, Tensor], blocks: int, groups: int = 1) -> None:
        distinct: dict[int, Tensor] = {}  # layers may share a tensor, or that of states lie where another's blocks do
        for name in sorted(caches):
            if not isinstance(caches[name], Tensor):
                raise ValueError(f"{name} is not one tensor")
            row, at = _bytes(name, caches[name], blocks), caches[name].data_ptr()
            if at not in distinct or distinct[at].shape[1] < row.shape[1]:
                distinct[at] = row
        self.part_bytes = max(row.shape[1] for row in distinct.values())  # of a block, in a layer
        rows = [_padded(row, self.part_bytes) for row in distinct.values()]
        self.device, self.groups = rows[0].device, groups
        self.block_bytes = self.part_bytes * len(rows)
        self.slot_bytes = self.block_bytes * groups
        steps = [self.part_bytes, *(number for row in rows for number in (row.stride(0), row.storage_offset()))]
        self.word = torch.uint8 if any(step % WORD.itemsize for step in steps) else WORD
        self.layers = [row.view(self.word) for row in rows]

    def copy(self, blocks: Sequence[int], slots: Sequence[int], store: SlotStore, *, save: bool) -> None:
        """From these blocks, as many a slot as there are groups, into these slots, or back; those below 0 are none. On
        a GPU it is queued on the current stream."""
        places = [(slot, group) for slot in slots for group in range(self.groups)]
        moved = [(block, store.words[place]) for block, place in zip(blocks, places, strict=True) if block >= 0]
        if self.device.type == "cuda":
            at_once = max(1, STAGED_BYTES // self.block_bytes)
            for at in range(0, len(moved), at_once):
                self._copy_staged(moved[at : at + at_once], save)
            return
        for block, place in moved:
            for layer, outside in zip(self.layers, place.unbind(), strict=True):
                into, out_of = (outside, layer[block]) if save else (layer[block], outside)
                into.copy_(out_of)

    def _copy_staged(self, moved: Sequence[tuple[int, Tensor]], save: bool) -> None:
        blocks, outside = zip(*moved, strict=True)
        chosen = torch.tensor(blocks).pin_memory().to(self.device, non_blocking=True)  # waits for nothing
        staged = torch.empty((len(blocks), *outside[0].shape), dtype=self.word, device=self.device)
        if save:
            for at, layer in enumerate(self.layers):
                torch.index_select(layer, 0, chosen, out=staged[:, at])
            for into, out_of in zip(outside, staged.unbind(), strict=True):
                into.copy_(out_of, non_blocking=True)
        else:
            for into, out_of in zip(staged.unbind(), outside, strict=True):
                into.copy_(out_of, non_blocking=True)
            for at, layer in enumerate(self.layers):
                layer.index_copy_(0, chosen, staged[:, at])


class SlotStore:
    """The shared memory, and in it the part `words` `[slot, group, layer, word]` of rank `rank`. Raises OSError,
    ValueError.

    Memory that is missing kills the process that touches it, so a file with holes is filled at once, and one that has
    been cut is noticed by `check`.
    """

    def __init__(self, store: SharedStore, blocks: LayerBlocks, rank: int, ranks: int) -> None:
        self._size = store.slots * ranks * blocks.slot_bytes
        self._slots = store.slots
        self._file = os.open(store.path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.check(())
        if os.fstat(self._file).st_blocks * 512 < self._size:
            os.posix_fallocate(self._file, 0, self._size)
        memory = torch.frombuffer(mmap.mmap(self._file, self._size), dtype=torch.uint8)
        if blocks.device.type == "cuda":
            _pin(self, memory, blocks.device)
        parts = memory.view(store.slots, ranks, blocks.groups, len(blocks.layers), blocks.part_bytes)
        self.words = parts[:, rank].view(blocks.word)

    def check(self, slots: Sequence[int]) -> None:
        """Raises OSError where the file has been cut, ValueError for slots that it has not got."""
        if os.fstat(self._file).st_size < self._size:
            raise OSError(f"the shared memory has less than {self._size} bytes")
        if any(not 0 <= slot < self._slots for slot in slots):
            raise ValueError(f"slots beyond the {self._slots} of the shared memory: {slots}")


def _bytes(name: str, tensor: Tensor, blocks: int) -> Tensor:
    """`[blocks, bytes]` of a tensor whose first dimension is the blocks, or the kernel's smaller ones."""
    order = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)  # as they lie in memory
    if not tensor.dim() or not tensor.shape[0] or tensor.shape[0] % blocks:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} has not {blocks} blocks first")
    try:
        return tensor.permute(0, *order).view(torch.uint8).view(blocks, -1)
    except RuntimeError as error:
        raise ValueError(f"a block of {name}, {tuple(tensor.shape)} with {tensor.stride()}, has gaps") from error


def _padded(row: Tensor, size: int) -> Tensor:
    """With the unused bytes behind what is smaller, as states are."""
    if row.shape[1] == size:
        return row
    try:
        if row.stride(0) >= size:
            return row.as_strided((row.shape[0], size), (row.stride(0), 1))
    except RuntimeError:  # beyond the memory's end
        pass
    raise ValueError(f"blocks of {row.shape[1]} and {size} bytes")


def _pin(owner: object, memory: Tensor, device: torch.device) -> None:
    """For the GPU to copy from and to it without the host's help, as long as `owner` lives."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    if (error := int(runtime.cudaHostRegister(address, memory.numel(), 0))) == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
        return
    log.warning("the shared memory cannot be pinned (CUDA error %d): copies will be slow", error)
    with suppress(RuntimeError):  # CUDA keeps the error for the next one who asks, a step of vLLM's
        torch.ones(1, device=device)
