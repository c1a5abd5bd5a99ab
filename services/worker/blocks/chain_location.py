"""Where a request's chain can be fetched from: its blocks by name, which vault keeps which, and what was found. Pure.

A run of 64 blocks lies in one vault, the ring's owner of its first hash, so equal sets of vaults share blocks alike at
every worker. The next vault on the ring is asked too: it kept the run until the owner joined. A dead vault's runs are
lost with it, so nothing is written to two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

from kvproto.block_hash import Root, pack_ids, parent_of, root_at, state_after
from kvproto.dataplane.block import RUN_BLOCKS, STATE_IDS
from kvproto.hash_ring import HashRing
from kvproto.messages import Tier

KEEPERS = 2


class BlockName(NamedTuple):
    """A full block's content address. `ids`: u32 little-endian, b"" if unknown. `root`: of a forked chain the public
    one for its first blocks. `run`: the first hash of the block's aligned run (`RUN_BLOCKS`), by which vaults share
    blocks; b"": its own."""

    root: bytes
    hash: bytes
    parent: bytes
    ids: bytes
    run: bytes = b""

    def state(self) -> BlockName:
        """Of the recurrent state at the block's end, which lies where the block does."""
        return BlockName(self.root, state_after(self.hash), self.hash, STATE_IDS, self.run or self.hash)


@dataclass(frozen=True, slots=True)
class StateForm:
    """Recurrent states of a hybrid model as vaults and peers have them: 16 bytes that are equal where states mean the
    same, a state's size, and how many blocks lie between two."""

    format: bytes
    nbytes: int
    every: int


@dataclass(slots=True)
class Finding:
    """How many leading blocks a vault and a peer have, without a gap, and behind how many a recurrent state that they
    have stands. Complete once `ready`."""

    ready: bool = False
    vault: int = 0
    peer: int = 0
    vault_states: tuple[int, ...] = ()  # ascending, as the next
    peer_states: tuple[int, ...] = ()

    def states(self, least: int, most: int) -> list[tuple[int, Tier]]:
        """States behind more than `least` blocks, and no more than `most`, deepest first, a peer's before a vault's."""
        found = [(point, Tier.PEER) for point in self.peer_states] + [
            (point, Tier.VAULT) for point in self.vault_states
        ]
        return sorted((one for one in found if least < one[0] <= most), key=lambda one: -one[0])


@dataclass(slots=True)
class ChainLocation:
    """A request's whole chain, and what was found of it beyond this worker. A `handed_over` chain is restored even
    where computing would be cheaper: that takes cores from others."""

    names: Sequence[BlockName]
    finding: Finding
    peer: str = ""
    handed_over: bool = False
    far: bool = False  # the peer is in another region
    look_s: float | None = None  # that sources have to answer; None: as usual
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


def state_points(names: Sequence[BlockName], every: int) -> list[int]:
    """Behind how many blocks of a chain a state may be kept: `every` so many, at the end of its public part, and at
    each of its last blocks' ends, as a worker takes them before it hands a sequence over."""
    last = len(names)
    forks = (at for at in range(1, last) if names[at - 1].root != names[at].root)
    return sorted({*range(every, last + 1, every), *forks, *range(max(1, last - RUN_BLOCKS), last + 1)})


class RingShare(NamedTuple):
    """A question to one vault or peer: positions in a list of names, in its order. `owned`: it should keep them."""

    root: bytes
    at: list[int]
    owned: bool = True

    def parts(self, size: int) -> Iterator[list[int]]:
        return (self.at[start : start + size] for start in range(0, len(self.at), size))


@dataclass(frozen=True, slots=True)
class VaultRing:
    ring: HashRing = field(default_factory=HashRing)

    def keepers(self, name: BlockName) -> tuple[str, ...]:
        """The owner, which a block is written to, then the vault that kept it before the owner joined."""
        return tuple(islice(self.ring.walk((name.run or name.hash).hex()), KEEPERS))

    def owner(self, name: BlockName) -> str | None:
        return self.ring.owner((name.run or name.hash).hex())

    def shares(self, names: Sequence[BlockName]) -> dict[str, list[RingShare]]:
        """By vault: the blocks that it may have."""
        shares: dict[str, list[RingShare]] = {}
        for start, end in _pieces(names):
            for rank, vault in enumerate(self.keepers(names[start])):
                _add(shares, vault, names[start].root, range(start, end), owned=rank == 0)
        return shares

    def homes(self, names: Sequence[BlockName], strays: Mapping[bytes, str]) -> dict[str, list[RingShare]]:
        """By vault: the blocks to fetch from it, each from one; `strays`: vaults of hashes not seen at their owner."""
        homes: dict[str, list[RingShare]] = {}
        for start, end in _pieces(names):
            root, owner = names[start].root, self.owner(names[start])
            if owner is None:
                continue
            if not strays:
                _add(homes, owner, root, range(start, end))
                continue
            for at in range(start, end):
                stray = strays.get(names[at].hash)
                _add(homes, stray if stray is not None and stray in self.ring.nodes else owner, root, (at,))
        return homes


def by_root(names: Sequence[BlockName]) -> list[RingShare]:
    """All of `names`: a forked chain has two roots."""
    shares: dict[str, list[RingShare]] = {}
    for start, end in _pieces(names):
        _add(shares, "", names[start].root, range(start, end))
    return shares.get("", [])


def _pieces(names: Sequence[BlockName]) -> Iterator[tuple[int, int]]:
    """Start and end of names that follow one another and have one root and one run."""
    start = 0
    for _, piece in groupby(names, key=lambda name: (name.root, name.run or name.hash)):
        end = start + len(list(piece))
        yield start, end
        start = end


def _add(
    shares: dict[str, list[RingShare]], holder: str, root: bytes, at: Iterable[int], *, owned: bool = True
) -> None:
    mine = shares.setdefault(holder, [])
    if mine and mine[-1].root == root and mine[-1].owned == owned:
        mine[-1].at.extend(at)
    else:
        mine.append(RingShare(root, list(at), owned))
