"""Loop: where other workers serve their blocks, read from the members bucket when a request names one.

A worker that watched all of them would be sent every record of the fleet each second: of a thousand workers, a million
records a second from NATS.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from kvfleet.worker.tiers.source import SourceAddress, peers_of
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.errors import CodecError, Unavailable
from kvproto.ids import is_token
from kvproto.messages import Role, WorkerRecord
from kvproto.subjects import member_key

log = logging.getLogger(__name__)

FRESH_S = 5.0  # after which who is named again is looked up again: it may have begun a new life
ASK_S = 0.02  # a request that names a peer waits no longer for its address
MOST_PEERS = 64

Meet = Callable[[str], Awaitable[None] | None]


class Peers:
    """Owned by the worker's loop. `tell` hears of all that are known, whenever that changes."""

    def __init__(self, bucket: Bucket, me: WorkerRecord, tell: Callable[[list[SourceAddress]], None]) -> None:
        self._bucket = bucket
        self._me = me
        self._tell = tell
        self._known: OrderedDict[str, tuple[float, SourceAddress | None]] = OrderedDict()  # asked for last comes last

    def meet(self, worker: str) -> Awaitable[None] | None:
        """What to await before `worker` is asked for blocks; None: nothing."""
        if not is_token(worker) or worker == self._me.id:  # those of other regions bring their addresses along
            return None
        known = self._known.get(worker)
        if known is not None and asyncio.get_running_loop().time() - known[0] < FRESH_S:
            return None
        return self._look_up(worker)

    async def _look_up(self, worker: str) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                entry = await self._bucket.get(member_key(Role.WORKER.value, worker))
            records = [codec.decode(WorkerRecord, entry.value)] if entry.value is not None else []
        except (Unavailable, CodecError, TimeoutError) as error:
            log.info("the address of worker %s is not known: %s", worker, error or "no answer in time")
            return
        before = self._addresses()
        found = next(iter(peers_of(records, self._me)), None)
        self._known[worker] = asyncio.get_running_loop().time(), found
        self._known.move_to_end(worker)
        while len(self._known) > MOST_PEERS:
            self._known.popitem(last=False)
        if self._addresses() != before:
            self._tell(self._addresses())

    def _addresses(self) -> list[SourceAddress]:
        return [address for _, address in self._known.values() if address is not None]
