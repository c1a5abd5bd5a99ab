"""What a worker serves to its peers: blocks of its device and host, lent while they are sent. It stores none of theirs.

Connection threads call it. The engine's thread finds and holds the blocks; a connection waits for it a short time.
A block is lent under the root of its chain alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvfleet.worker.blocks.block_pool import BlockPool, Lendable
from kvfleet.worker.model.base import BlockFormat
from kvfleet.worker.tiers.host import HostTier
from kvproto.block_hash import STATE_ID, pack_ids
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.serving import BlockStore, ServedBlocks

LEASES = 4  # at a time, each of one batch of a listener
LEASE_TIMEOUT_S = 0.5  # for a lease to become free; then the peer is told that nothing is there
ANSWER_TIMEOUT_S = 0.25  # for the engine's thread; likewise

Post = Callable[[Callable[[object], None]], None]  # work for the engine's thread, from any thread
Chains = list[tuple[BlockPool, list[int]]]
Read = Callable[[int], memoryview]


class Lender(Protocol):
    """Whose blocks they are. `lent`: chains that are held for peers."""

    @property
    def memory(self) -> BlockFormat: ...

    @property
    def lent(self) -> dict[int, Chains]: ...

    def readable(self) -> list[tuple[BlockPool, Read]]: ...

    def lendable(self, asked: Iterable[bytes]) -> dict[bytes, Lendable]:
        """Of these names, the recurrent states that are here."""
        return {}


@dataclass(eq=False, slots=True)
class HostLender(Lender):
    """A host tier alone, of an engine whose device cannot be read. `states` finds recurrent ones by their names."""

    host: HostTier
    memory: BlockFormat
    states: Callable[[Iterable[bytes]], dict[bytes, Lendable]] = lambda asked: {}
    lent: dict[int, Chains] = field(default_factory=dict)

    def readable(self) -> list[tuple[BlockPool, Read]]:
        return [(self.host.pool, self.host.view)]

    def lendable(self, asked: Iterable[bytes]) -> dict[bytes, Lendable]:
        return self.states(asked)


@dataclass(eq=False)
class PeerStore(BlockStore):
    tiers: Lender
    post: Post
    _free: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(LEASES))

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        if not self._free.acquire(timeout=LEASE_TIMEOUT_S):
            return ServedBlocks([None] * len(hashes), lambda: None)
        chains: Chains = []

        def release() -> None:
            try:
                if chains:
                    self.post(lambda _: self._let_go(chains))
            finally:
                self._free.release()

        try:
            found, chains = self._ask(lambda: self._hold(root, hashes, exact))
            return ServedBlocks([self._sealed(one, found[one]) if one in found else None for one in hashes], release)
        except BaseException:
            release()
            raise

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        found, _ = self._ask(lambda: self._find(root, hashes, exact))
        return [one in found for one in hashes]

    def _sealed(self, block_hash: bytes, found: Lendable) -> tuple[BlockHeader, memoryview]:
        content, payload = found.content, found.read().cast("B")
        name = content.root, block_hash, content.parent, pack_ids(content.ids)
        size = len(payload)
        return BlockHeader(*name, found.kv_format, BlockCodec.RAW, size, size, content.lossy).sealed(payload), payload

    def _ask(
        self, question: Callable[[], tuple[dict[bytes, Lendable], Chains]]
    ) -> tuple[dict[bytes, Lendable], Chains]:
        """The answer of the engine's thread; nothing, and nothing held, if it has not begun in time."""
        answer: Future[tuple[dict[bytes, Lendable], Chains]] = Future()

        def work(_: object) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
                raise

        self.post(work)
        try:
            return answer.result(ANSWER_TIMEOUT_S)
        except TimeoutError:
            return ({}, []) if answer.cancel() else answer.result()

    def _find(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> tuple[dict[bytes, Lendable], Chains]:
        """Blocks that are here, and the chains that hold them. Deepest first: holding a block holds its chain."""
        found: dict[bytes, Lendable] = {}
        chains: Chains = []
        for pool, read in self.tiers.readable():
            covered: set[int] = set()
            for block_hash in reversed(hashes):
                block = None if block_hash in found else pool.index.find(block_hash)
                if block is None or (content := pool.index[block]).root != root:
                    continue
                if block not in covered:
                    chain = pool.ancestry(block_hash)
                    chains.append((pool, chain))
                    covered.update(chain)
                if not (exact and content.lossy):
                    found[block_hash] = Lendable(content, self.tiers.memory.kv_format, partial(read, block))
        for name, state in self.tiers.lendable([one for one in hashes if one not in found]).items():
            if state.content.root == root and not (exact and state.content.lossy):
                found[name] = state
        return found, chains

    def _hold(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> tuple[dict[bytes, Lendable], Chains]:
        found, chains = self._find(root, hashes, exact)
        for name, one in found.items():
            if one.held is not None:
                chains.append(one.held)
            elif one.content.ids == (STATE_ID,):
                found[name] = one._replace(read=_copied(one.read()))
        for pool, chain in chains:
            pool.acquire(chain)
        if chains:
            self.tiers.lent[id(chains)] = chains
        return found, chains

    def _let_go(self, chains: Chains) -> None:
        for pool, chain in chains:
            pool.release(chain)
        del self.tiers.lent[id(chains)]


def _copied(view: memoryview) -> Callable[[], memoryview]:
    copy = memoryview(bytes(view))
    return lambda: copy
