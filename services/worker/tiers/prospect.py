"""What a request could have brought to the device: its chain by name, and who was found to have it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BlockName(NamedTuple):
    """A full block's content address and what it is made of. `ids` are u32 little-endian; `root` is the one that the
    block is kept under: of a forked chain the public one for its first blocks. `run` is the first hash of the block's
    aligned run of its chain (`runs_of`), by which vaults share blocks; b"": its own."""

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
class Prospect:
    """A request's whole chain, and what was found of it beyond this worker."""

    names: Sequence[BlockName]
    finding: Finding
    peer: str = ""
