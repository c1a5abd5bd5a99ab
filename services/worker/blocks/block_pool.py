"""Who holds which block of the KV pool, and what the others still contain. Pure; the engine thread owns it.

    free ──allocate──▶ held (refs > 0) ──release, nothing kept──▶ free
                        │  ▲                                       ▲
                release │  │ acquire (prefix hit)                  │ evict (leaf first)
                        ▼  │                                       │
                       idle: cached, refs == 0 ────────────────────┘

Five rules keep it simple:

* A sequence holds a chain: the holder of a block holds all blocks before it (`fill` swaps duplicates for the cached
  block). So everything that continues an idle block is idle, and evicting leaves yields all: available = free + idle.
* `windowed` sequences are the exception: they let go of leading blocks that no later token reaches. A block then goes
  once nothing *idle* continues it directly, and everything that continues it leaves the index with it, held or not. So
  what is in the index always has all blocks before it in the index as well.
* Full blocks are shared by reference, found by hash. Less than a block is shared by copy: `match` names a donor and how
  many of its leading tokens agree, the caller copies it into a block of its own.
* Only `allocate` evicts and only `fill` stores, so within one engine step all removals come before all stores.
* Along a chain in the index what is exact comes first, and what is lossy (quantised once, or computed on such) after
  it. A request for exact results neither reads lossy blocks nor lists what it computed in their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvfleet.worker.blocks.content_index import Content, ContentIndex
from kvfleet.worker.eviction.base import EvictionBalance, EvictionPolicy
from kvfleet.worker.eviction.lru import LruEviction
from kvproto.block_hash import ForkedRoot, Root, digest_term, parent_of
from kvproto.messages import BlockRun, Tier, TierEvents


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: `tokens` of it, in full `blocks` and then the first `donor_tokens` of block `donor`. `state`:
    the slot of the recurrent state behind it; -1: none."""

    blocks: list[int]
    donor: int | None
    donor_tokens: int
    tokens: int
    lossy: bool = False
    state: int = -1


class BlockPool:
    """Blocks are named by 0 ... num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windowed = False  # set before use: holders may let go of the front of their chains
        self.cached = 0  # idle blocks: without a holder, with content
        self.evictions = 0
        self.digest = 0  # of the full blocks with a content address
        self.index = ContentIndex()  # others only read it
        self.on_unlisted: Callable[[Content], None] | None = None
        self._policy = policy or LruEviction()
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle_children: dict[bytes, int] = {}  # hash -> idle blocks that continue it directly
        self._tick = 0
        self._removed: list[bytes] = []
        self._stored: list[tuple[bytes, list[bytes]]] = []  # (hash before a run, hashes of the run)

    @property
    def available(self) -> int:
        return len(self._free) + self.cached

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` count as available now and would not once acquired."""
        return sum(1 for block in blocks if not self._refs[block])

    def held_once(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` would become available if their holder let go; one that comes twice has it twice."""
        return sum(1 for block, times in Counter(blocks).items() if block >= 0 and self._refs[block] == times)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(
        self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], limit: int, *, exact: bool = False
    ) -> Match:
        """Longest cached prefix of `ids[:limit]`; `hashes`: the chain over the full blocks of `ids` under `root`.
        `exact`: nothing lossy."""
        size = self.block_size
        blocks = self.chain_to(hashes[: limit // size], exact=exact)
        full = len(blocks)
        start = full * size
        parent = parent_of(root, hashes, full)
        donor, donor_tokens = self.index.longest_child(parent, ids[start : min(start + size, limit)], exact=exact)
        lossy = (bool(blocks) and self.index[blocks[-1]].lossy) or (donor is not None and self.index[donor].lossy)
        return Match(blocks, donor, donor_tokens, start + donor_tokens, lossy)

    def chain_to(self, hashes: Sequence[bytes], *, exact: bool = False) -> list[int]:
        blocks: list[int] = []
        for block_hash in hashes:
            block = self.index.find(block_hash)
            if block is None or (exact and self.index[block].lossy):
                break
            blocks.append(block)
        return blocks

    def ancestry(self, block_hash: bytes) -> list[int]:
        """The chain that ends with this block, as far up as the index has it; empty if the block is not cached."""
        blocks: list[int] = []
        block = self.index.find(block_hash)
        while block is not None:
            blocks.append(block)
            block = self.index.find(self.index[block].before)
        return blocks[::-1]

    def continuations(self, block_hash: bytes) -> dict[bytes, bytes]:
        """All full blocks that continue this one, directly or not, with their roots."""
        found: dict[bytes, bytes] = {}
        above = [block_hash]
        while above:
            for block in self.index.children(above.pop()):
                content = self.index[block]
                if content.hash is not None:
                    found[content.hash] = content.root
                    above.append(content.hash)
        return found

    def is_lossy(self, block_hash: bytes) -> bool:
        block = self.index.find(block_hash)
        return block is not None and self.index[block].lossy

    @property
    def balance(self) -> EvictionBalance:
        return self._policy.balance

    def asked(self, hashes: Sequence[bytes], limit: int, cached: int) -> None:
        """See `EvictionPolicy.asked`."""
        self._policy.asked(hashes, limit, cached)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold cached or held blocks once more, in chain order."""
        for block in blocks:
            if not self._refs[block]:
                self._wake(block)
                self._policy.reused(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` blocks of unknown content, evicting cached ones as needed. Raises ValueError, and changes
        nothing, if fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a holder's blocks, in chain order. Those with content stay cached until evicted."""
        self._tick += 1
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block not in self.index:
                self._free.append(block)
            else:
                self._rest(block)

    def rest_first(self, hashes: Sequence[bytes]) -> int:
        """The idle blocks of a chain go before all others from now on, from its end back to a block that is held or
        that others continue. Returns how many."""
        first: set[int] = set()
        chain = self.chain_to(hashes)
        for block, block_hash in zip(reversed(chain), reversed(hashes[: len(chain)]), strict=True):
            after = [one for one in self.index.children(block_hash) if one not in first]
            if self._refs[block] or any(self._refs[one] or self.index[one].hash is not None for one in after):
                break
            for one in (*after, block):  # after it there is at most the rest of the same sequence
                first.add(one)
                self._policy.demote(one)
                if self._policy.is_offered(one):
                    self._policy.withdraw(one)
                    self._policy.offer(one)
        return len(first)

    def fill(
        self, block: int, root: Root, hashes: Sequence[bytes], at: int, ids: Sequence[int], *, lossy: bool = False
    ) -> int:
        """List `block`, held by the caller alone, which now has KV for the whole `at`-th block of a chain. If that
        content is cached already the caller holds the cached block instead, and `block` is free. Returns which."""
        block_hash = hashes[at]
        twin = self.index.find(block_hash)
        if twin is not None:
            self.acquire((twin,))
            self._refs[block] = 0
            self._free.append(block)
            return twin
        self.store(block, root, hashes, at, ids, lossy=lossy)
        return block

    def store(
        self, block: int, root: Root, hashes: Sequence[bytes], at: int, ids: Sequence[int], *, lossy: bool = False
    ) -> None:
        """List a held block, of a content that is not cached; it may have several holders."""
        content = Content.of(root, hashes, at, ids, full=True, lossy=lossy)
        self.index.add(block, content)
        self._policy.stored(block, content.hash, at, self.index.find(content.before))
        self.digest ^= digest_term(hashes[at])
        if self._stored and self._stored[-1][1][-1] == content.parent:
            self._stored[-1][1].append(hashes[at])
        else:
            self._stored.append((content.parent, [hashes[at]]))

    def keep_tail(
        self, block: int, root: Root, hashes: Sequence[bytes], at: int, ids: Sequence[int], *, lossy: bool = False
    ) -> None:
        """List a holder's partly filled last block, with KV for `ids`, before its release. If one tail begins with
        another, only the longer is kept."""
        tail = Content.of(root, hashes, at, ids, full=False, lossy=lossy)
        if not ids or self.index.longest_child(tail.parent, ids)[1] == len(ids):
            return
        for shorter in self.index.shorter_tails(tail.parent, tail.ids):
            self._forget(shorter)
        self.index.add(block, tail)
        self._policy.stored(block, None, at, self.index.find(tail.before))

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int = 0) -> int:
        """Forget what only this token sequence has: from its end back to a block that is held or that others continue,
        the public prefix, or the first `keep` tokens. Returns how many blocks went, a partial tail included."""
        size, gone = self.block_size, 0
        first = max(keep // size, root.blocks if isinstance(root, ForkedRoot) else 0)
        for full in range(len(hashes), first - 1, -1):
            start = full * size
            parent = parent_of(root, hashes, full)
            for tail in self.index.shorter_tails(parent, (*ids[start : start + size], -1)):
                if not self._refs[tail]:
                    self._forget(tail)
                    gone += 1
            if full <= first:
                break
            block = self.index.find(hashes[full - 1])
            if block is None:
                continue
            if self._refs[block] or self.index.has_children(hashes[full - 1]):
                break
            self._forget(block)
            gone += 1
        return gone

    def drop(self, block_hash: bytes) -> int:
        """Take a block of wrong content and all that continues it out of the index; holders keep holding them. Returns
        how many full blocks went."""
        block = self.index.find(block_hash)
        if block is None:
            return 0
        before = self.index.addressed
        if self._refs[block]:
            self._unlist(block)
        else:
            self._forget(block)
        self._sever(block_hash)
        return before - self.index.addressed

    def take_changes(self, tier: Tier) -> list[TierEvents]:
        """Removals since the last call, then stores."""
        changes = []
        if self._removed:
            changes.append(TierEvents(tier, True, (BlockRun(b"", tuple(self._removed)),)))
        if self._stored:
            changes.append(TierEvents(tier, False, tuple(BlockRun(before, tuple(run)) for before, run in self._stored)))
        self._removed, self._stored = [], []
        return changes

    def _is_leaf(self, block: int) -> bool:
        """Whether nothing idle continues it."""
        block_hash = self.index[block].hash
        return block_hash is None or block_hash not in self._idle_children

    def _rest(self, block: int) -> None:
        self.cached += 1
        content = self.index[block]
        siblings = self._idle_children.get(content.before, 0)
        self._idle_children[content.before] = siblings + 1
        if not siblings and (before := self.index.find(content.before)) is not None:
            self._policy.withdraw(before)  # maybe evictable until now, as only held blocks continued it
        self._policy.touch(block, self._tick)
        if self._is_leaf(block):
            self._policy.offer(block)

    def _wake(self, block: int) -> None:
        """An idle block is about to be held, or to leave the index."""
        self.cached -= 1
        self._policy.withdraw(block)
        content = self.index[block]
        siblings = self._idle_children.pop(content.before) - 1
        if siblings:
            self._idle_children[content.before] = siblings
            return
        before = self.index.find(content.before)
        if before is not None and not self._refs[before]:
            self._policy.offer(before)

    def _evict(self) -> int:
        block = self._policy.victim()
        self._wake(block)
        before = self.index.addressed
        block_hash = self._unlist(block)
        if block_hash is not None and self.index.has_children(block_hash):
            self._sever(block_hash)
        self.evictions += before - self.index.addressed
        return block

    def _forget(self, block: int) -> None:
        self._wake(block)
        self._unlist(block)
        self._free.append(block)

    def _unlist(self, block: int) -> bytes | None:
        content = self.index.remove(block)
        if self.on_unlisted is not None:
            self.on_unlisted(content)
        block_hash = content.hash
        if block_hash is not None:
            self.digest ^= digest_term(block_hash)
            self._removed.append(block_hash)
        return block_hash

    def _sever(self, block_hash: bytes) -> None:
        """Take what continues a removed block out of the index; idle blocks among it become free."""
        above = [block_hash]
        while above:
            for block in self.index.children(above.pop()):
                idle = not self._refs[block]
                if idle:
                    self._wake(block)
                    self._free.append(block)
                if (gone := self._unlist(block)) is not None:
                    above.append(gone)


class Lendable(NamedTuple):
    """A block, held by its chain, or a recurrent state: `held` while it is read; None: it is read at once."""

    content: Content
    kv_format: bytes
    read: Callable[[], memoryview]
    held: tuple[BlockPool, list[int]] | None = None
