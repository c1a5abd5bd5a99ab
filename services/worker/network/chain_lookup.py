"""Loop: asks vaults, and the peer that placement named, for a request's chain before the engine has the request.

The worker's event loop owns it; chains may be hashed on any thread.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from kvfleet.worker.blocks.chain_location import BlockName, ChainLocation, names_of
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.tiers.break_even import FAR_LOOK_S, HANDED_LOOK_S, LOOK_WORTH_S
from kvfleet.worker.tiers.remote import RemoteTiers
from kvproto.block_hash import Root, chain
from kvproto.messages import GenerateRequest
from kvproto.regions import seal, split

log = logging.getLogger(__name__)

Hashed = Mapping[tuple[int, ...], Sequence[BlockName]]  # a request's chains, by the output of a choice so far


@dataclass(frozen=True, slots=True)
class ChainLookup:
    remote: RemoteTiers | None
    engine: EngineThread
    block_size: int
    fleet_key: bytes

    def of(
        self, request: GenerateRequest, root: Root, ids: tuple[int, ...], hashed: Hashed, traceparent: str
    ) -> Callable[[int], ChainLocation | None]:
        """Locates each choice's chain. Fresh choices share their prompt, and so one look."""

        @cache
        def look(outputs: tuple[int, ...]) -> ChainLocation | None:
            return self._look(request, root, ids + outputs, hashed.get(outputs), traceparent)

        return lambda choice: look(request.continuation(choice).output_ids)

    def would_look(self, request: GenerateRequest, tokens: int) -> bool:
        rate = self.engine.measured[1].prefill_tokens_per_s
        if self.remote is None or tokens <= self.block_size:
            return False
        return not rate or tokens >= LOOK_WORTH_S * rate or request.handed_over

    def hash(self, request: GenerateRequest, root: Root, ids: tuple[int, ...]) -> Hashed:
        """Takes long for a long request. Called on any thread."""
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
        if self.remote is None or not self.would_look(request, len(known)):
            return None
        size = self.block_size
        names = hashed if hashed is not None else names_of(root, chain(root, known, size), known, size)
        is_far, source = bool(split(request.source)[0]), request.source
        if is_far and self._is_vouched_for(request):
            self.remote.introduce(source, request.source_addresses)
        elif is_far:
            is_far, source = False, ""
        finding = self.remote.look(
            names,
            exact=request.exact,
            peer=source,
            on_ready=self.engine.wake,
            limit_s=FAR_LOOK_S if is_far else HANDED_LOOK_S if request.handed_over else None,
            traceparent=traceparent,
        )
        return ChainLocation(names, finding, source, request.handed_over, is_far, traceparent)

    def _is_vouched_for(self, request: GenerateRequest) -> bool:
        """Whether the sender of a source in another region has the fleet's key."""
        sealed = seal(self.fleet_key, request.source, request.source_addresses)
        if self.fleet_key and hmac.compare_digest(sealed, request.source_seal):
            return True
        log.warning("request %s: the addresses of %s are not believed", request.request, request.source)
        return False
