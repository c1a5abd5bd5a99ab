"""What vLLM's scheduler has its workers move in a step, between their blocks and the slots of the worker beside vLLM.

A piece is PIECE_TOKENS tokens of one request, a block of vLLM's is several. The bytes of a block cannot be split by
token, so piece k of a block is the k-th part of its bytes in each layer. Hence the bytes of a piece depend on all
tokens of its block, those after the piece included: the pieces of a block move together, and those of two blocks are
alike only if all tokens of the blocks are.

    slot = rank 0 │ rank 1 │ ...      rank = layer a │ layer b │ ...      layer = the k-th part of the block's bytes

Pure; pickled on its way to the workers.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A file to map into memory, which the worker beside vLLM owns."""

    path: str
    slots: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """The pieces of these blocks, from piece `at` of the request's tokens on, go into `slots`, in order. `request` is
    the worker's name for it."""

    request: str
    at: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """These blocks are filled from `slots`, in order. `request` is vLLM's id, `name` the worker's."""

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
