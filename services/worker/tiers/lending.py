"""What this worker serves to its peers: blocks of its device and host, lent for as long as they are sent.

Called on the connections' threads of the worker's own listener: the engine's thread looks blocks up and holds them
where they are, and a connection waits for it a short time at most. So there are only so many leases at a time. A block
is lent under the root of its chain alone. Nothing is taken from peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.content_index import Content
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.block_hash import pack_ids
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.serving import BlockStore

LEASES = 4  # each of a listener's batch at most
LEASE_TIMEOUT_S = 0.5  # of a peer's connection for a lease to become free; then it is told that nothing is there
ANSWER_TIMEOUT_S = 0.25  # of a connection for the engine's thread; likewise

Post = Callable[[Callable[[object], None]], None]  # work for the engine's thread, from any thread
Chains = list[tuple[BlockPool, list[int]]]
Found = tuple[Content, Callable[[], memoryview]]  # a block that is here, and what reads it while it is held


@dataclass(frozen=True, slots=True)
class BlockLease:
    """What one request gets, in the order asked for; None: not there. The bytes stay as they are until `release`, which
    is called once, on any thread."""

    blocks: Sequence[tuple[BlockHeader, memoryview] | None]
    release: Callable[[], None]


@dataclass(eq=False)
class PeerStore(BlockStore):
    tiers: Tiers
    post: Post
    _free: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(LEASES))

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> BlockLease:
        if not self._free.acquire(timeout=LEASE_TIMEOUT_S):
            return BlockLease([None] * len(hashes), lambda: None)
        chains: Chains = []

        def release() -> None:
            try:
                if chains:
                    self.post(lambda _: self._let_go(chains))
            finally:
                self._free.release()

        try:
            found, chains = self._ask(lambda: self._hold(root, hashes, exact))
            return BlockLease([self._sealed(one, found[one]) if one in found else None for one in hashes], release)
        except BaseException:
            release()
            raise

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        found, _ = self._ask(lambda: self._find(root, hashes, exact))
        return [one in found for one in hashes]

    def _sealed(self, block_hash: bytes, found: Found) -> tuple[BlockHeader, memoryview]:
        content, read = found
        payload = read().cast("B")
        header = BlockHeader(
            content.root,
            block_hash,
            content.parent,
            pack_ids(content.ids),
            self.tiers.memory.kv_format,
            BlockCodec.RAW,
            len(payload),
            len(payload),
            content.lossy,
        )
        return header.sealed(payload), payload

    def _ask(self, question: Callable[[], tuple[dict[bytes, Found], Chains]]) -> tuple[dict[bytes, Found], Chains]:
        """The answer of the engine's thread; nothing, and nothing held, if that has not begun with it in time."""
        answer: Future[tuple[dict[bytes, Found], Chains]] = Future()

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

    # ------------------------------------------------------------------ on the engine's thread

    def _find(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> tuple[dict[bytes, Found], Chains]:
        """Where each block is, and the chains that hold them. Deepest first: the holder of a chain's last block holds
        all of it."""
        found: dict[bytes, Found] = {}
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
                    found[block_hash] = content, partial(read, block)
        return found, chains

    def _hold(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> tuple[dict[bytes, Found], Chains]:
        found, chains = self._find(root, hashes, exact)
        for pool, chain in chains:
            pool.acquire(chain)
        if chains:
            self.tiers.lent[id(chains)] = chains
        return found, chains

    def _let_go(self, chains: Chains) -> None:
        for pool, chain in chains:
            pool.release(chain)
        del self.tiers.lent[id(chains)]

    # ------------------------------------------------------------------ what a peer cannot do

    def reserve(self, header: BlockHeader) -> memoryview | None:
        return None

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        return False

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        pass

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        return 0
