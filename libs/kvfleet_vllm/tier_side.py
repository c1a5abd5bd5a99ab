"""What the connector does in vLLM's scheduler where vLLM's own tiers move the blocks, as they can on GPUs: between
vLLM's host memory and the worker's it copies them itself, in threads, and vLLM's workers have no part in it.

    vLLM's blocks ◀──vLLM──▶ chunks of its host memory ◀──here──▶ slots of the worker's shared memory

To the worker this is one rank, whose block is a whole chunk. Of a save it hears when it is done, so that one that fails
leaves nothing behind. All but the copies runs on the scheduler's thread. Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

from kvfleet_vllm.block_copies import LayerBlocks, SlotStore
from kvfleet_vllm.block_moves import BlockMoves, LoadBlocks, SaveBlocks, SharedStore
from kvfleet_vllm.cache_groups import CacheGroups
from kvfleet_vllm.request_params import RequestParams
from kvfleet_vllm.scheduler_side import SchedulerSide
from kvfleet_vllm.wire import VERSION, BlocksRead, BlocksSaved, BlocksSaving, EngineHello, Message, WorkerHello

log = logging.getLogger(__name__)

NOTHING = BlockMoves(0, "", None, (), (), (), False)


@dataclass(frozen=True, slots=True)
class TierMove:
    """What became of a job of vLLM's tiers: so many blocks in so many seconds. A save of none is no failure."""

    job: int
    is_done: bool
    blocks: int = 0
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class _Copy:
    job: int
    request: str
    order: LoadBlocks | SaveBlocks
    connection: int
    seconds: Future[float]


class TierSide(SchedulerSide):
    """`formats` are of vLLM's workers, known a little later, as `host` is, vLLM's memory: chunks are its blocks.
    `forget_host` has vLLM forget all of it."""

    def __init__(
        self,
        hello: Callable[[], EngineHello],
        clock: Callable[[], float] = time.monotonic,
        groups: CacheGroups = CacheGroups(),
        ranks: int = 1,
    ) -> None:
        super().__init__(hello, clock, groups)
        self.tokens = groups.tokens
        self.formats: Mapping[int, bytes] = {}
        self.forget_host: Callable[[], None] = lambda: None
        self._ranks = ranks
        self._host: LayerBlocks | None = None
        self._layout = b""
        self._slots: SlotStore | None = None
        self._mapped: SharedStore | None = None
        self._loader = ThreadPoolExecutor(1, "kvfleet-loads")
        self._saver = ThreadPoolExecutor(1, "kvfleet-saves")
        self._copies: list[_Copy] = []
        self._moved: list[TierMove] = []
        self._unread: list[Message] = []

    # What vLLM's tiers ask.

    def attach(self, host: LayerBlocks, layout: bytes) -> None:
        """`layout` tells what of a chunk's meaning the formats of the workers do not."""
        self._host, self._layout = host, layout

    def detach(self) -> None:
        self._loader.shutdown()
        self._saver.shutdown()
        self._host = self._slots = None

    def wants(self, request: str) -> bool:
        """Whether its blocks are to be saved, those that vLLM has already too."""
        return self._saves.wants(request)

    def offers(self, request: str, block: int) -> bool:
        return self._slots is not None and self._restores.offers(request, block)

    def load(self, job: int, request: str, into: Mapping[int, int]) -> None:
        """Into these chunks, of the request's blocks by number. Once per request: its slots are free afterwards."""
        order = self._restores.take(request, into) if self._is_open() else None
        if order is None:
            self._moved.append(TierMove(job, False))
        else:
            self._begin(job, request, order)

    def save(self, job: int, request: str, chunks: Mapping[int, int]) -> None:
        """Of these chunks, the request's blocks by number, those that are wanted."""
        order = self._saves.follow(request, chunks) if self._is_open() else None
        if order is None:
            self._moved.append(TierMove(job, True))
        else:
            self._begin(job, request, order)

    def no_more(self, request: str) -> None:
        """vLLM has given all that there is of a request to be saved."""
        self._saves.stop(request)

    def moved(self) -> list[TierMove]:
        """Since the last time."""
        ended = [one for one in self._copies if one.seconds.done()]
        self._listen()  # only now: the connection may have ended while they were copied
        for copy in ended:
            self._copies.remove(copy)
            self._moved.append(self._ended(copy))
        moved, self._moved = self._moved, []
        return moved

    def drain(self) -> None:
        wait([copy.seconds for copy in self._copies])

    # What vLLM's connector asks.

    def restorable(self, request: Any, cached: int) -> int:
        self._restores.own[request.request_id] = cached
        return 0

    def allocated(self, request: Any, blocks: object, tokens: int) -> None:
        self._restores.give_up(request.request_id)

    def request_finished(self, request: str) -> None:
        self._news.finished(request, self._clock())
        self._restores.finished(request)

    def step(self, output: Any) -> BlockMoves:
        self._obey()
        news = self._news.step(output, self._clock(), self._restores.own)
        _, given_up = self._restores.step()
        self._link.send([*news, *(BlocksRead(name, 0, 0.0) for name in given_up)])
        self._follow_link()
        return NOTHING

    # Inside.

    def _plan(self, request: Any, params: RequestParams) -> None:
        super()._plan(request, params)
        if self._store == self._mapped or self._store is None or self._host is None:
            return
        self._mapped, self._slots = self._store, None
        try:
            self._slots = SlotStore(self._store, self._host, 0, 1)
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("no shared memory at %.200s: %s", self._store.path, error)

    def _orders(self) -> list[Message]:
        self._listen()
        orders, self._unread = self._unread, []
        return orders

    def _listen(self) -> None:
        """An end of the connection is noticed; orders wait until they can be obeyed."""
        self._unread += self._link.receive()

    def _erase(self, hashes: Iterable[int | bytes]) -> int:
        self.forget_host()  # which of it has these hashes cannot be asked
        return super()._erase(hashes)

    def _follow_link(self) -> bool:
        if super()._follow_link():
            return True
        self._slots, self._mapped, self._unread = None, None, []
        if self._connection:
            size = 0 if self._host is None else self._host.block_bytes
            self._link.send([WorkerHello(VERSION, 0, 1, self._format(), size)])
        return False

    def _format(self) -> bytes:
        """Empty unless all of vLLM's workers have told theirs."""
        known = [self.formats.get(rank, b"") for rank in range(self._ranks)]
        if self._host is None or not all(known):
            return b""
        return blake2b(b"".join([b"chunk", self._layout, *known]), digest_size=16).digest()

    def _is_open(self) -> bool:
        self._listen()
        return self._slots is not None and self._link.number == self._connection

    def _begin(self, job: int, request: str, order: LoadBlocks | SaveBlocks) -> None:
        assert self._host is not None
        assert self._slots is not None
        thread = self._loader if isinstance(order, LoadBlocks) else self._saver
        seconds = thread.submit(_copied, order, self._slots, self._host)
        self._copies.append(_Copy(job, request, order, self._connection, seconds))

    def _ended(self, copy: _Copy) -> TierMove:
        order, error = copy.order, copy.seconds.exception()
        seconds = 0.0 if error is not None else copy.seconds.result()
        is_same = copy.connection == self._link.number  # else the slots may have been another's meanwhile
        is_done = error is None and (is_same or isinstance(order, SaveBlocks))
        if not is_done:
            log.warning("blocks of %s were not moved: %s", copy.request, error or "the worker is gone")
            self._saves.stop(copy.request)
        if is_same and isinstance(order, LoadBlocks):
            self._link.send([BlocksRead(order.name, len(order.blocks) if is_done else 0, seconds)])
        elif is_same and isinstance(order, SaveBlocks) and is_done:
            saving = BlocksSaving(order.request, order.at, order.slots)
            self._link.send([saving, BlocksSaved(order.request, order.slots)])
        if is_same and error is not None:
            self._slots = None  # until the worker has another memory
        return TierMove(copy.job, is_done, len(order.blocks), seconds)


def _copied(order: LoadBlocks | SaveBlocks, store: SlotStore, host: LayerBlocks) -> float:
    """On one of the threads: in how many seconds."""
    store.check(order.slots)
    began = time.perf_counter()
    host.copy(order.blocks, order.slots, store, save=isinstance(order, SaveBlocks))
    return time.perf_counter() - began


# vLLM makes the connector and its tiers apart, in one process: here the tier finds the side of its engine.
SIDES: WeakValueDictionary[str, TierSide] = WeakValueDictionary()
