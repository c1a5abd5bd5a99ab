"""The tensor that holds recurrent states, one slot a sequence or snapshot, and what a step does to it. Adapter.

A slot is one contiguous piece, all layers' parts after one another, so that a snapshot is one copy. New states are
written once the whole step has been computed: a step that is given up, or computed again in parts, begins where it did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcpu.vector.memory import huge_pages
from kvfleet.worker.model.base import StatePieces
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.recurrent import Part, Parts, StateCache, StateShape
from kvproto.dataplane.block import state_format
from kvproto.errors import OutOfMemory
from kvsampling.sampler import is_out_of_memory


class StatePool:
    """`data` `[slots, bytes]` is zero at first. Raises OutOfMemory if the device cannot hold it."""

    def __init__(self, shape: StateShape, num_slots: int, device: torch.device) -> None:
        self.shape, self.num_slots, self.device = shape, num_slots, device
        self.state_bytes = shape.nbytes
        try:
            if device.type == "cpu":
                self.data = huge_pages(num_slots * shape.nbytes).view(num_slots, shape.nbytes)
            else:
                self.data = torch.zeros((num_slots, shape.nbytes), dtype=torch.int8, device=device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            total = num_slots * shape.nbytes / 2**30
            raise OutOfMemory(f"a pool of {num_slots} recurrent states ({total:.2f} GiB): {error}") from error
        self._layers: dict[int, Parts] = {}
        for part in shape.parts:
            piece = self.data[:, part.offset : part.offset + part.nbytes].view(part.dtype)
            self._layers.setdefault(part.layer, {})[part.name] = piece.view(num_slots, *part.shape)

    def parts(self, layer: int) -> Parts:
        """Each `[slots, ...]`, views."""
        return self._layers[layer]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Whole states (source, target), one after the other; source -1: none, the target becomes zero."""
        for source, target in copies:
            if source < 0:
                self.data[target].zero_()
            elif source != target:
                self.data[target].copy_(self.data[source])


class StateMemory(StatePieces):
    """The bytes of states, by slot; of a model whose blocks have the format `blocks`."""

    def __init__(self, pool: StatePool, blocks: bytes) -> None:
        self.block_bytes = pool.state_bytes
        parts = [(one.layer, *one.name, one.shape, str(one.dtype)) for one in pool.shape.parts]
        self.kv_format = state_format(blocks, parts)
        self._data = pool.data.view(torch.uint8)

    def read(self, block: int, target: memoryview) -> None:
        torch.frombuffer(target, dtype=torch.uint8).copy_(self._data[block])

    def write(self, block: int, source: memoryview) -> None:
        self._data[block].copy_(torch.frombuffer(source, dtype=torch.uint8))


@dataclass(eq=False, slots=True)
class _Write:
    slots: Tensor
    parts: Parts


@dataclass(eq=False, slots=True)
class _Piece:
    """Tokens of one sequence that a layer computes in one call; at its end the state goes to slots `after`."""

    first: int
    end: int
    source: int | None  # slot; None: the state of the piece before it; -1: none
    after: list[int]


@dataclass(eq=False)
class StateStep:
    """Recurrent layers of one step."""

    pool: StatePool
    batch: RaggedBatch
    _writes: dict[int, list[_Write]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows: list[int] = []
        slots: list[int] = []
        self._taken: list[tuple[int, int]] = []  # of the decodes: row among them, slot of its snapshot
        self._pieces: list[_Piece] = []
        for first, part in zip(self.batch.first.tolist(), self.batch.slices, strict=True):
            if len(part.ids) == 1 and part.state >= 0:
                self._taken += [(len(rows), slot) for _, slot in part.snapshots]
                rows.append(first)
                slots.append(part.state)
                continue
            at: int = first
            source: int | None = part.state
            for tokens, slot in part.snapshots:
                if (end := first + tokens - part.start) < first + len(part.ids):
                    self._pieces.append(_Piece(at, end, source, [slot]))
                    at, source = end, None
            own = [part.state] if part.state >= 0 else []
            last = [slot for tokens, slot in part.snapshots if tokens == part.end]
            self._pieces.append(_Piece(at, first + len(part.ids), source, [*own, *last]))
        self._rows, self._slots = self._index(rows), self._index(slots)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.pool.device)

    def mix(self, layer: int, forward: Callable[..., Tensor], hidden: Tensor, keywords: dict[str, Any]) -> Tensor:
        held = self.pool.parts(layer)
        mixed = torch.empty_like(hidden)
        writes: list[_Write] = []
        if len(self._rows):
            cache = StateCache({name: part.index_select(0, self._slots) for name, part in held.items()})
            mixed[0, self._rows] = forward(hidden[0, self._rows].unsqueeze(1), cache_params=cache, **keywords)[:, 0]
            writes.append(_Write(self._slots, cache.parts))
            for row, slot in self._taken:
                writes.append(
                    _Write(self._index([slot]), {name: of[row : row + 1] for name, of in cache.parts.items()})
                )
        parts: dict[Part, Tensor] = {}
        for piece in self._pieces:
            if (source := piece.source) is not None:
                parts = {} if source < 0 else {name: part[source : source + 1] for name, part in held.items()}
            cache = StateCache({name: part.clone() for name, part in parts.items()})  # some layers write into it
            span = slice(piece.first, piece.end)
            mixed[:, span] = forward(hidden[:, span], cache_params=cache, **keywords)
            parts = {name: part.clone() for name, part in cache.parts.items()}  # else views of a whole chunk's inputs
            writes += [_Write(self._index([slot]), parts) for slot in piece.after]
        self._writes[layer] = writes
        return mixed

    def commit(self) -> None:
        """The step has been computed: its sequences' states, and its snapshots, are those after it."""
        for layer, writes in self._writes.items():
            held = self.pool.parts(layer)
            for write in writes:
                for name, part in write.parts.items():
                    held[name].index_copy_(0, write.slots, part.to(held[name].dtype))
        self._writes = {}
