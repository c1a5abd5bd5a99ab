"""Lends blocks of device and host to peers, for as long as they are being sent.

`EngineLender` is called on connections' threads: the engine's thread looks blocks up and holds them, a connection waits
for it a short time at most, and what is held too late is let go at once. A block is lent under the root of its chain
alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.tiers.peer_store import LentBlock
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.block_hash import pack_ids

T = TypeVar("T")

ANSWER_TIMEOUT_S = 0.25
Post = Callable[[Callable[[object], None]], None]  # work for the engine's thread, from any thread


class Found(NamedTuple):
    name: BlockName
    read: Callable[[], memoryview]
    lossy: bool


class EngineLent:
    """See `peer_store.Lent`: what is held for one request."""

    def __init__(
        self,
        found: Sequence[Found | None],
        held: dict[int, tuple[BlockPool, list[int]]],
        tiers: Tiers,
        post: Post,
    ) -> None:
        self.blocks: list[LentBlock | None] = [None] * len(found)
        self._found = found
        self._held = held
        self._tiers = tiers
        self._post = post

    def read(self) -> None:
        """Have the bytes, on the connection's thread: a GPU's blocks are copied."""
        self.blocks = [one and LentBlock(one.name, one.read(), one.lossy) for one in self._found]

    def release(self) -> None:
        if self._held:
            self._post(lambda _: self.let_go())

    def let_go(self) -> None:
        """On the engine's thread."""
        for pool, chain in self._held.values():
            pool.release(chain)
        self._held = {}
        self._tiers.lent.pop(id(self), None)


class EngineLender:
    """See `peer_store.Lender`."""

    def __init__(self, tiers: Tiers, post: Post) -> None:
        self._tiers = tiers
        self._post = post

    def lend(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> EngineLent:
        nothing = EngineLent([None] * len(hashes), {}, self._tiers, self._post)
        lent = self._ask(lambda: self._hold(root, hashes, exact), nothing, EngineLent.let_go)
        try:
            lent.read()
        except BaseException:
            lent.release()
            raise
        return lent

    def holds(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        def look() -> list[bool]:
            found = self._find(root, hashes, exact)[0]
            return [block_hash in found for block_hash in hashes]

        return self._ask(look, [False] * len(hashes), lambda _: None)

    def _find(
        self, root: bytes, hashes: Sequence[bytes], exact: bool
    ) -> tuple[dict[bytes, Found], list[tuple[BlockPool, list[int]]]]:
        """Where each block is, and the chains that hold them. Deepest first: the holder of a chain's last block holds
        all of it."""
        found: dict[bytes, Found] = {}
        chains: list[tuple[BlockPool, list[int]]] = []
        for pool, read in self._tiers.readable():
            covered: set[int] = set()
            for block_hash in reversed(hashes):
                block = None if block_hash in found else pool.find(block_hash)
                if block is None:
                    continue
                content = pool.content(block)
                if content.root != root:
                    continue
                if block not in covered:
                    chain = pool.ancestry(block_hash)
                    chains.append((pool, chain))
                    covered.update(chain)
                if not (exact and content.lossy):
                    name = BlockName(root, block_hash, content.parent, pack_ids(content.ids))
                    found[block_hash] = Found(name, partial(read, block), content.lossy)
        return found, chains

    def _hold(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> EngineLent:
        found, chains = self._find(root, hashes, exact)
        for pool, chain in chains:
            pool.acquire(chain)
        lent = EngineLent([found.get(one) for one in hashes], dict(enumerate(chains)), self._tiers, self._post)
        self._tiers.lent[id(lent)] = chains
        return lent

    def _ask(self, question: Callable[[], T], default: T, undo: Callable[[T], None]) -> T:
        """The engine's answer, or the default if it comes too late."""
        answered = threading.Event()
        lock = threading.Lock()
        answers: list[T] = []
        late = False

        def answer(_: object) -> None:
            if late:
                return
            result = question()
            with lock:
                if not late:
                    answers.append(result)
                    answered.set()
                    return
            undo(result)

        self._post(answer)
        answered.wait(ANSWER_TIMEOUT_S)
        with lock:
            late = not answers
        return answers[0] if answers else default
