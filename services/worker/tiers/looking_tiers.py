"""Loop: asks vaults, and the peer that placement named, for a request's chain before the engine has the request.

The worker's event loop owns it; chains may be hashed on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache

from kvfleet.worker.blocks.chain_location import BlockName, ChainLocation, Finding, names_of
from kvfleet.worker.port.engine_port import Hashed, TierPort
from kvfleet.worker.port.sequence_spec import Locate
from kvfleet.worker.tiers.break_even import FAR_LOOK_S, HANDED_LOOK_S, LOOK_WORTH_S, look_limit_s
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.transfers import LOOK_LIMIT_S
from kvproto.block_hash import HASH_BYTES, ForkedRoot, Root, chain
from kvproto.messages import GenerateRequest, HotChain
from kvproto.regions import seal, split

log = logging.getLogger(__name__)

VAULT_LIMIT_S = 0.1


class LookingTiers(TierPort):
    """`block_size` in tokens; `fleet_key` vouches for sources in other regions."""

    block_size: int
    fleet_key: bytes

    @property
    @abstractmethod
    def remote(self) -> RemoteTiers | None: ...

    @property
    @abstractmethod
    def prefill_tokens_per_s(self) -> float:
        """0 until measured."""

    @abstractmethod
    def wake(self) -> None:
        """There is an answer. From any thread."""

    def locate(
        self, request: GenerateRequest, root: Root, ids: tuple[int, ...], hashed: Hashed, traceparent: str
    ) -> Locate:
        @cache
        def look(outputs: tuple[int, ...]) -> ChainLocation | None:
            return self._look(request, root, ids + outputs, hashed.get(outputs), traceparent)

        return lambda choice: look(request.continuation(choice).output_ids)

    def would_look(self, request: GenerateRequest, tokens: int) -> bool:
        rate = self.prefill_tokens_per_s
        if self.remote is None or tokens <= self.block_size:
            return False
        return not rate or tokens >= LOOK_WORTH_S * rate or request.handed_over

    def hash(self, request: GenerateRequest, root: Root, ids: tuple[int, ...]) -> Hashed:
        size = self.block_size
        outputs = {request.continuation(choice).output_ids for choice in range(request.sampling.n)}
        return {one: names_of(root, chain(root, ids + one, size), ids + one, size) for one in outputs}

    def _look(
        self,
        request: GenerateRequest,
        root: Root,
        known: tuple[int, ...],
        hashed: Sequence[BlockName] | None,
        traceparent: str,
    ) -> ChainLocation | None:
        if (remote := self.remote) is None or not self.would_look(request, len(known)):
            return None
        size = self.block_size
        names = hashed if hashed is not None else names_of(root, chain(root, known, size), known, size)
        is_far, source = bool(split(request.source)[0]), request.source
        if is_far and self._is_vouched_for(request):
            remote.introduce(source, request.source_addresses)
        elif is_far:
            is_far, source = False, ""
        rate = self.prefill_tokens_per_s
        usual_s = look_limit_s(len(known) / rate if rate else 0.0, LOOK_LIMIT_S)
        limit_s = FAR_LOOK_S if is_far else HANDED_LOOK_S if request.handed_over else usual_s
        finding = remote.look(
            names, exact=request.exact, peer=source, on_ready=self.wake, limit_s=limit_s, traceparent=traceparent
        )
        return ChainLocation(names, finding, source, request.handed_over, is_far, limit_s, traceparent)

    def _is_vouched_for(self, request: GenerateRequest) -> bool:
        """Whether the sender of a source in another region has the fleet's key."""
        sealed = seal(self.fleet_key, request.source, request.source_addresses)
        if self.fleet_key and hmac.compare_digest(sealed, request.source_seal):
            return True
        log.warning("request %s: the addresses of %s are not believed", request.request, request.source)
        return False

    async def in_vaults(self, root: Root, ids: Sequence[int]) -> int:
        names = names_of(root, chain(root, ids, self.block_size), ids, self.block_size)
        return (await self._ask(names, "", VAULT_LIMIT_S)).vault

    async def at_peer(self, names: Sequence[BlockName], peer: str, limit_s: float) -> int:
        return (await self._ask(names, peer, limit_s)).peer

    async def _ask(self, names: Sequence[BlockName], peer: str, limit_s: float) -> Finding:
        """Of the peer alone, or of vaults."""
        if self.remote is None:
            return Finding()
        loop, answered = asyncio.get_running_loop(), asyncio.Event()

        def on_ready() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answered.set)

        limit = limit_s if peer else None
        finding = self.remote.look(names, exact=False, peer=peer, on_ready=on_ready, limit_s=limit, vaults=not peer)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answered.wait(), limit_s)
        return finding


def blocks_of(hot: HotChain) -> tuple[Root, list[bytes]]:
    """Its root and hashes."""
    root: Root = hot.root
    if hot.public_blocks:
        root = ForkedRoot(hot.public_root, hot.root, hot.public_blocks)
    raw = hot.hashes
    return root, [raw[at : at + HASH_BYTES] for at in range(0, len(raw) - len(raw) % HASH_BYTES, HASH_BYTES)]
