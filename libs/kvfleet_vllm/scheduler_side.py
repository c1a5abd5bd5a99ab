"""What the connector does in vLLM's scheduler: it tells the worker of requests and steps, and erases blocks for it.

All of it runs on the scheduler's thread. Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvfleet_vllm.sidecar_link import SidecarLink
from kvfleet_vllm.step_news import StepNews
from kvfleet_vllm.wire import KEY, VERSION, BlocksErased, EngineHello, EraseBlocks

log = logging.getLogger(__name__)

GROUP_BYTES = 4  # of the cache group, after the hash in vLLM's key of a block
HASH_BYTES = 8  # the last of a hash: all that an event with a number for a hash tells


class SchedulerSide:
    """`pool` is vLLM's BlockPool, known a little later than the rest."""

    def __init__(self, hello: Callable[[], EngineHello], clock: Callable[[], float] = time.monotonic) -> None:
        self.pool: Any = None
        self._clock = clock
        self._link = SidecarLink(hello)
        self._news = StepNews()

    def request_added(self, request: Any) -> None:
        """Before vLLM looks for its blocks: a request never hits what it was sent after the order to erase."""
        self._obey()
        path = socket_path(request.kv_transfer_params)
        if path is not None:
            self._link.open(path)
            self._obey()
        self._news.added(request, path is not None)

    def request_finished(self, request: str) -> None:
        self._news.finished(request)

    def step(self, output: Any) -> None:
        self._obey()
        self._link.send(self._news.step(output, self._clock()))

    def close(self) -> None:
        self._link.close("vLLM shuts down")

    def _obey(self) -> None:
        for order in self._link.receive():
            if isinstance(order, EraseBlocks):
                self._link.send([BlocksErased(order.number, erase(self.pool, order.hashes))])


def socket_path(params: Any) -> str | None:
    """Where the worker listens that sent a request with these kv_transfer_params; None if no worker of ours did."""
    asked = params.get(KEY) if isinstance(params, dict) else None
    if not isinstance(asked, dict):
        return None
    if asked.get("version") != VERSION or not isinstance(asked.get("socket"), str):
        log.warning("kv_transfer_params of a worker that this version (%d) does not understand: %.200r", VERSION, asked)
        return None
    path: str = asked["socket"]
    return path


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
