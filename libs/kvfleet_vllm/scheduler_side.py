"""What the connector does in vLLM's scheduler: it tells the worker of requests and steps, erases blocks for it, and
plans which blocks are saved for it and which it brings back.

All of it runs on the scheduler's thread. Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvfleet_vllm.block_moves import BlockMoves, SaveBlocks, SaveState, SharedStore
from kvfleet_vllm.cache_groups import CacheGroups
from kvfleet_vllm.request_params import RequestParams, params_of
from kvfleet_vllm.restore_plan import RestorePlan
from kvfleet_vllm.save_plan import SavePlan
from kvfleet_vllm.sidecar_link import SidecarLink
from kvfleet_vllm.step_news import StepNews, computed_tokens, is_choice, name_of
from kvfleet_vllm.wire import (
    BlocksErased,
    BlocksSaving,
    EngineHello,
    EraseBlocks,
    GrantSlots,
    Message,
    StateSaving,
)

log = logging.getLogger(__name__)

GROUP_BYTES = 4  # of the cache group, after the hash in vLLM's key of a block
HASH_BYTES = 8  # the last of a hash: all that an event with a number for a hash tells


class SchedulerSide:
    """`pool` is vLLM's BlockPool, known a little later than the rest. Blocks are brought back only where vLLM
    `recomputes` what cannot be loaded."""

    def __init__(
        self,
        hello: Callable[[], EngineHello],
        clock: Callable[[], float] = time.monotonic,
        groups: CacheGroups = CacheGroups(),
        recomputes: bool = True,
    ) -> None:
        self.pool: Any = None
        self._clock = clock
        self._link = SidecarLink(hello)
        self._connection = 0  # what is offered, wanted and granted is of this one
        self._store: SharedStore | None = None
        self._news = StepNews()
        self._tokens = groups.tokens
        self._recomputes = recomputes
        self._restores = RestorePlan(groups)
        self._saves = SavePlan(groups)

    def request_added(self, request: Any) -> None:
        """Before vLLM looks for its blocks: a request never hits what it was sent after the order to erase."""
        self._obey()
        params = params_of(request.kv_transfer_params, self._tokens)
        if params is not None:
            self._link.open(params.socket)
            self._obey()
            if self._connection and self._link.path == params.socket:
                self._plan(request, params)
        self._news.added(request, params is not None)

    def restorable(self, request: Any, cached: int) -> int:
        return self._restores.restorable(request.request_id, cached, request.num_tokens)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        self._restores.allocated(request.request_id, tables, tokens)

    def loaded(self, requests: Iterable[str], bad_blocks: Iterable[int], bad_requests: Iterable[str] = ()) -> None:
        for request in self._restores.ended(requests, set(bad_blocks), set(bad_requests)):
            log.warning("blocks of %s were not loaded; it is computed, and nothing of it saved", request)
            self._saves.stop(request)

    def request_finished(self, request: str) -> None:
        self._news.finished(request, self._clock())
        self._restores.finished(request)
        self._saves.stop(request)

    def step(self, output: Any) -> BlockMoves:
        self._obey()
        news = self._news.step(output, self._clock(), self._restores.own)
        saves = self._saves.step(computed_tokens(output), lambda one: block_tables(output, one)) if self._tokens else []
        self._link.send([*news, *map(_told, saves)])
        loads, given_up = self._restores.step()
        if not self._follow_link():
            saves, given_up = [], ()
        idle = not output.total_num_scheduled_tokens
        return BlockMoves(self._connection, self._link.path, self._store, tuple(saves), loads, given_up, idle)

    def close(self) -> None:
        self._link.close("vLLM shuts down")

    def _plan(self, request: Any, params: RequestParams) -> None:
        self._store = params.store or self._store
        if params.store is None or not self._tokens or not is_movable(request):
            return
        name = name_of(request.request_id)
        if params.restore_slots and self._recomputes:
            slots = params.restore_slots, params.restore_state
            self._restores.offer(request.request_id, name, params.restore_at, *slots)
        if params.save_from is not None:
            self._saves.want(request, name, params.save_from)

    def _obey(self) -> None:
        self._follow_link()
        for order in self._orders():
            if isinstance(order, EraseBlocks):
                self._link.send([BlocksErased(order.number, self._erase(order.hashes))])
            elif isinstance(order, GrantSlots):
                self._saves.grant(order.slots)
        self._follow_link()

    def _orders(self) -> list[Message]:
        return self._link.receive()

    def _erase(self, hashes: Iterable[int | bytes]) -> int:
        return erase(self.pool, hashes)

    def _follow_link(self) -> bool:
        """Whether the connection is the one it was. What an earlier one's worker has told is void."""
        if self._link.number == self._connection:
            return True
        self._connection, self._store = self._link.number, None
        self._restores.forget()
        self._saves.forget()
        return False


def is_movable(request: Any) -> bool:
    """Blocks are named by a chain of tokens alone, one sequence a request. A LoRA adapter is in the root that the
    worker begins that chain with: by its name and a digest of its files."""
    return (
        not getattr(request, "mm_features", None)
        and getattr(request, "prompt_embeds", None) is None
        and not is_choice(request.request_id)
    )


def block_tables(output: Any, request: str) -> Sequence[Sequence[int]]:
    """The whole block table of a request that `output`, a SchedulerOutput, schedules, in each group."""
    found: Sequence[Sequence[int]] = output.kv_connector_block_state.get_block_ids(request)
    return found


def _told(save: SaveBlocks) -> Message:
    kind = StateSaving if isinstance(save, SaveState) else BlocksSaving
    return kind(save.request, save.at, save.slots)


def erase(pool: Any, hashes: Iterable[int | bytes]) -> int:
    """Forget the cached blocks of these hashes, in all cache groups. Those in use stay, without a hash. Returns how
    many blocks it met."""
    ends = {
        one[-HASH_BYTES:] if isinstance(one, bytes) else (one % (1 << 64)).to_bytes(HASH_BYTES, "big") for one in hashes
    }
    part = slice(-HASH_BYTES - GROUP_BYTES, -GROUP_BYTES)
    found = {block.block_id for block in pool.blocks if (key := block.block_hash) is not None and key[part] in ends}
    # Of models with state layers one block may have further names, for prefixes that end inside it.
    for block, keys in getattr(pool, "cached_block_hashes_by_block", {}).items():
        if any(key[part] in ends for key in keys):
            found.add(block)
    pool.evict_blocks(found)
    return len(found)
