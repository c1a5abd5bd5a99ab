"""Where a request's chain can be fetched from: its blocks by name, and which sources have them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvproto.block_hash import Root, pack_ids, parent_of, root_at
from kvproto.dataplane.block import RUN_BLOCKS


class BlockName(NamedTuple):
    """A full block's content address. `ids`: u32 little-endian, b"" if unknown. `root`: of a forked chain the public
    one for its first blocks. `run`: the first hash of the block's aligned run (`RUN_BLOCKS`), by which vaults share
    blocks; b"": its own."""

    root: bytes
    hash: bytes
    parent: bytes
    ids: bytes
    run: bytes = b""


@dataclass(slots=True)
class Finding:
    """How many leading blocks a vault and a peer have, without a gap. Complete once `ready`."""

    ready: bool = False
    vault: int = 0
    peer: int = 0


@dataclass(slots=True)
class ChainLocation:
    """A request's whole chain, and what was found of it beyond this worker. A `handed_over` chain is restored even
    where computing would be cheaper: that takes cores from others."""

    names: Sequence[BlockName]
    finding: Finding
    peer: str = ""
    handed_over: bool = False
    far: bool = False  # the peer is in another region
    traceparent: str = ""  # of a traced request, for calls to vaults and peers


def names_of(root: Root, hashes: Sequence[bytes], ids: Sequence[int], block_size: int) -> list[BlockName]:
    """Blocks beyond `ids` have unknown tokens."""
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
