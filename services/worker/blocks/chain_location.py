"""Where a request's chain can be fetched from: its blocks by name, and which sources have them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvproto.block_hash import Root, pack_ids, parent_of, root_at
from kvproto.dataplane.block import RUN_BLOCKS


class BlockName(NamedTuple):
    """A full block's content address and what it is made of. `ids` are u32 little-endian, b"": not known here. `root`
    is the one that the block is kept under: of a forked chain the public one for its first blocks. `run` is the first
    hash of the block's aligned run of its chain (`runs_of`), by which vaults share blocks; b"": its own."""

    root: bytes
    hash: bytes
    parent: bytes
    ids: bytes
    run: bytes = b""


@dataclass(slots=True)
class Finding:
    """How many blocks from the first asked for, without a gap, can be had where. Complete once `ready`."""

    ready: bool = False
    vault: int = 0
    peer: int = 0


@dataclass(slots=True)
class ChainLocation:
    """A request's whole chain, and what was found of it beyond this worker. One that was `handed_over` is to be
    restored whatever computing would cost, which takes cores from others."""

    names: Sequence[BlockName]
    finding: Finding
    peer: str = ""
    handed_over: bool = False
    far: bool = False  # the peer is in another region
    traceparent: str = ""  # of a traced request: what vaults and peers are asked below


def names_of(root: Root, hashes: Sequence[bytes], ids: Sequence[int], block_size: int) -> list[BlockName]:
    """A whole chain by name; of blocks beyond `ids` the tokens are not known."""
    return [
        BlockName(
            root_at(root, at),
            block_hash,
            parent_of(root, hashes, at),
            pack_ids(ids[at * block_size : (at + 1) * block_size]),
            hashes[at - at % RUN_BLOCKS],
        )
        for at, block_hash in enumerate(hashes)
    ]
