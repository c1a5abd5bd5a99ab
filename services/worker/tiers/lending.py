"""Lends blocks of device and host to peers, for as long as they are being sent.

`EngineLender` is called on connections' threads: the engine's thread looks blocks up and holds them, a connection waits
for it a short time at most, and what is held too late is let go at once. A block is lent under the root of its chain
alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvproto.block_hash import pack_ids
from services.worker.block_pool import BlockPool
from services.worker.tiers.peer_store import LentBlock
from services.worker.tiers.prospect import BlockName
from services.worker.tiers.tiers import Tiers

T = TypeVar("T")

PATIENCE_S = 0.25
Post = Callable[[Callable[[object], None]], None]  # work for the engine's thread, from any thread


class EngineLent:
    """See `peer_store.Lent`: what is held for one request."""

    def __init__(self, blocks: list[LentBlock | None], held: list[tuple[BlockPool, list[int]]], end: Post) -> None:
        self.blocks = blocks
        self.held = held
        self._end = end

    def release(self) -> None:
        self._end(lambda _: self.let_go())

    def let_go(self) -> None:
        """On the engine's thread."""
        for pool, chain in self.held:
            pool.release(chain)
        self.held.clear()


class EngineLender:
    """See `peer_store.Lender`."""

    def __init__(self, tiers: Tiers, post: Post) -> None:
        self._tiers = tiers
        self._post = post

    def lend(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> EngineLent:
        nothing = EngineLent([None] * len(hashes), [], self._post)
        return self._ask(lambda: self._hold(root, hashes, exact), nothing, EngineLent.let_go)

    def holds(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        def look() -> list[bool]:
            lent = self._hold(root, hashes, exact)
            lent.let_go()
            return [block is not None for block in lent.blocks]

        return self._ask(look, [False] * len(hashes), lambda _: None)

    def _hold(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> EngineLent:
        """Deepest first: whoever holds a chain's last block holds all of it."""
        blocks: dict[bytes, LentBlock] = {}
        held: list[tuple[BlockPool, list[int]]] = []
        for pool, read in self._tiers.readable():
            holding: set[int] = set()
            for block_hash in reversed(hashes):
                block = None if block_hash in blocks else pool.find(block_hash)
                if block is None:
                    continue
                if block not in holding:
                    chain = pool.ancestry(block_hash)
                    if self._tiers.root_above(pool.content(chain[0]).parent) != root:
                        continue
                    pool.acquire(chain)
                    held.append((pool, chain))
                    holding.update(chain)
                content = pool.content(block)
                if not (exact and content.lossy):
                    name = BlockName(root, block_hash, content.parent, pack_ids(content.ids))
                    blocks[block_hash] = LentBlock(name, read(block), content.lossy)
        self._tiers.lent.append(held)
        return EngineLent([blocks.get(block_hash) for block_hash in hashes], held, self._post)

    def _ask(self, question: Callable[[], T], default: T, undo: Callable[[T], None]) -> T:
        """The engine's answer, or the default if it comes too late."""
        answered = threading.Event()
        lock = threading.Lock()
        answers: list[T] = []
        late = False

        def answer(_: object) -> None:
            result = question()
            with lock:
                if not late:
                    answers.append(result)
                    answered.set()
                    return
            undo(result)

        self._post(answer)
        answered.wait(PATIENCE_S)
        with lock:
            late = not answers
        return answers[0] if answers else default
