"""What vLLM's scheduler has its workers move in a step, between their blocks and the slots of the worker beside vLLM.

A block moves whole: how the tokens of one lie in its bytes is the attention kernel's own.

    slot = rank 0 │ rank 1 │ ...    rank = group │ group │ ...    group = layer a │ layer b │ ...: a block's bytes in it

Orders name as many blocks for each slot as there are groups in it, slot after slot; NONE (`cache_groups`) for none.

Pure; pickled on its way to the workers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A file to map into memory, which the worker beside vLLM owns."""

    path: str
    slots: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """These blocks, from number `at` of the request's on, go into `slots`, in order. `request` is the worker's name for
    it."""

    request: str
    at: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveState(SaveBlocks):
    """The same of the state behind the request's first `at` blocks."""


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """These blocks are filled from `slots`, in order, those of a state last. `request` is vLLM's id, `name` the
    worker's."""

    request: str
    name: str
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """`connection` numbers the scheduler's connections to workers; 0: there is none, and `sidecar` is not a path.
    Slots are of that connection's worker. Restores of the requests `given_up` are not read. A step that is `idle`
    computes nothing."""

    connection: int
    sidecar: str
    store: SharedStore | None
    saves: tuple[SaveBlocks, ...]
    loads: tuple[LoadBlocks, ...]
    given_up: tuple[str, ...]
    idle: bool
