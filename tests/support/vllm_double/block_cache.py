"""The double's KV cache: blocks found again by a hash of salt and tokens, the least recently used go first. Pure.

It has the fields of vLLM's BlockPool that the connector reads, and tells events in vLLM's form.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

GROUP = bytes(4)  # the one cache group, after the hash in a block's key


@dataclass(eq=False, slots=True)
class Block:
    block_id: int
    block_hash: bytes | None = None
    users: int = 0
    state: int = 0  # of the model, after its last token


@dataclass(frozen=True, slots=True)
class Lora:
    """A loaded adapter. `weights` stand for what was in its files then."""

    name: str
    path: str
    weights: int


def hashes_of(salt: str | None, ids: Sequence[int], size: int, lora: Lora | None = None) -> list[bytes]:
    """Of all full blocks. An adapter is in it by name and path."""
    which = None if lora is None else (lora.name, lora.path)
    found: list[bytes] = []
    parent = b"none"
    for start in range(0, len(ids) - size + 1, size):
        key = repr((which, salt if not start else None, list(ids[start : start + size]))).encode()
        found.append(parent := hashlib.sha256(parent + key).digest())
    return found


def told(block_hash: bytes) -> int:
    """As an event names it."""
    return int.from_bytes(block_hash, "big") & (2**64 - 1)


@dataclass(eq=False)
class BlockCache:
    count: int
    size: int
    blocks: list[Block] = field(init=False)
    events: list[dict[str, Any]] = field(default_factory=list)
    _free: OrderedDict[int, Block] = field(init=False)  # the next one to be taken first
    _cached: dict[bytes, dict[int, Block]] = field(default_factory=dict)  # copies of each

    def __post_init__(self) -> None:
        self.blocks = [Block(number) for number in range(self.count)]
        self._free = OrderedDict((block.block_id, block) for block in self.blocks)

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, hashes: Sequence[bytes]) -> list[Block]:
        """Leading cached ones."""
        found: list[Block] = []
        for one in hashes:
            copies = self._cached.get(one)
            if not copies:
                break
            found.append(next(iter(copies.values())))
        return found

    def take(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.users += 1
            self._free.pop(block.block_id, None)

    def allocate(self, count: int) -> list[Block]:
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.users = 1
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """The deepest is the first to go."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self._free[block.block_id] = block

    def store(
        self,
        blocks: Sequence[Block],
        hashes: Sequence[bytes],
        ids: Sequence[int],
        salt: str | None,
        lora: Lora | None = None,
    ) -> None:
        """Name full blocks, which follow the first ones of `hashes`; `ids` are the sequence's up to their end."""
        if not blocks:
            return
        start = len(hashes) - len(blocks)
        for block, one in zip(blocks, hashes[start:], strict=True):
            block.block_hash = one + GROUP
            self._cached.setdefault(one, {})[block.block_id] = block
        named = [] if lora is None else [lora.name]
        keys: list[Any] = [named or None] * len(blocks)
        if not start and salt is not None:
            keys[0] = [*named, salt]
        self.events.append(
            {
                "type": "BlockStored",
                "block_hashes": [told(one) for one in hashes[start:]],
                "parent_block_hash": told(hashes[start - 1]) if start else None,
                "token_ids": list(ids[start * self.size :]),
                "block_size": self.size,
                "lora_id": None if lora is None else 1,
                "medium": "GPU",
                "lora_name": None if lora is None else lora.name,
                "extra_keys": keys,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        for number in block_ids:
            self._forget(self.blocks[number])

    def _forget(self, block: Block) -> None:
        if block.block_hash is None:
            return
        one, block.block_hash = block.block_hash[: -len(GROUP)], None
        copies = self._cached[one]
        del copies[block.block_id]
        if not copies:
            del self._cached[one]
        self.events.append({"type": "BlockRemoved", "block_hashes": [told(one)], "medium": "GPU", "group_idx": 0})
