"""What the connector does in each of vLLM's workers: it copies blocks to and from the shared memory.

    step's main thread   connect, start loads ──▶ forward ──▶ save, say what is there ──▶ say what has been read
    load thread                       reads into blocks that no step touches meanwhile

Slots are good for as long as the connection to their owner is open: it is looked at before a save is begun and after a
load is done. A connection that ends here comes back with the scheduler's next one only, for the slots are that one's.
Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from kvfleet_vllm.block_copies import LayerBlocks, SlotStore
from kvfleet_vllm.block_moves import BlockMoves, LoadBlocks, SharedStore
from kvfleet_vllm.sidecar_link import SidecarLink
from kvfleet_vllm.wire import BlocksRead, BlocksSaved, Message, WorkerHello

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.005  # for loads, while vLLM has nothing to compute and would ask again at once


@dataclass(eq=False, slots=True)
class _Load:
    order: LoadBlocks
    connection: int
    read: Future[tuple[int, float]]  # slots, seconds


@dataclass(eq=False, slots=True)
class _Save:
    told: BlocksSaved
    connection: int
    store: SlotStore
    event: Any  # of CUDA


class WorkerSide:
    """`blocks` is None where they cannot be moved. Owned by the thread that runs the steps."""

    def __init__(self, hello: Callable[[], WorkerHello], blocks: LayerBlocks | None) -> None:
        self._hello = hello()
        self._link = SidecarLink(hello)
        self._blocks = blocks
        self._connection = 0  # of the scheduler
        self._wanted: SharedStore | None = None
        self._store: SlotStore | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stream: Any = None  # of CUDA, for loads: one, as memory that was used on a stream is kept for it
        self._loads: list[_Load] = []
        self._saves: list[_Save] = []
        self._bad: set[int] = set()
        self._failed: set[str] = set()

    def start(self, moves: BlockMoves) -> None:
        """Before `save`, with the scheduler's orders of the step."""
        self._follow(moves)
        self._tell([BlocksRead(name, 0, 0.0) for name in moves.given_up])
        for order in moves.loads:
            self._loads.append(_Load(order, self._connection, self._begin(order)))

    def save(self, moves: BlockMoves) -> None:
        """What the step has completed. The blocks may be overwritten by what is queued on the stream afterwards."""
        if not moves.saves or not self._is_open() or self._store is None or self._blocks is None:
            return
        for save in moves.saves:
            try:
                self._store.check(save.slots)
                self._blocks.copy(save.blocks, save.slots, self._store, save=True)
            except (OSError, ValueError, torch.OutOfMemoryError) as error:
                self._give_up(str(error))
                return
        told = [BlocksSaved(save.request, save.slots) for save in moves.saves]
        if self._blocks.device.type == "cuda":
            event = torch.cuda.current_stream(self._blocks.device).record_event()
            self._saves += [_Save(one, self._connection, self._store, event) for one in told]
        else:
            self._tell(told)

    def finished(self, idle: bool) -> set[str]:
        """The requests whose loads have ended, for better or worse. A step that is idle waits a little for them."""
        self._confirm(idle)
        running = [load.read for load in self._loads]
        if idle and running:
            wait(running, IDLE_WAIT_S, FIRST_COMPLETED)
        ended = [load for load in self._loads if load.read.done()]
        self._loads = [load for load in self._loads if load not in ended]
        for load in ended:
            self._end(load)
        return {load.order.request for load in ended}

    def take_bad_blocks(self) -> set[int]:
        """The blocks of loads that failed."""
        bad, self._bad = self._bad, set()
        return bad

    def take_failed(self) -> set[str]:
        """The requests of loads that failed."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        self._link.close("vLLM shuts down")
        if self._thread is not None:
            self._thread.shutdown()

    def _follow(self, moves: BlockMoves) -> None:
        """To the worker that the scheduler is connected to, and its shared memory."""
        if moves.connection != self._connection:
            self._link.close("the scheduler's connection is another one")
            self._connection, self._wanted, self._store = moves.connection, None, None
            if moves.connection:
                self._link.open(moves.sidecar)
        if moves.store == self._wanted or not self._link.number:
            return
        self._wanted, self._store = moves.store, None
        if moves.store is not None and self._blocks is not None:
            try:
                self._store = SlotStore(moves.store, self._blocks, self._hello.rank, self._hello.ranks)
            except (OSError, ValueError, RuntimeError) as error:
                self._give_up(f"no shared memory at {moves.store.path:.200}: {error}")

    def _begin(self, order: LoadBlocks) -> Future[tuple[int, float]]:
        if not self._is_open() or self._store is None or self._blocks is None:
            nothing: Future[tuple[int, float]] = Future()
            nothing.set_result((0, 0.0))
            return nothing
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvfleet-loads")
        before = None
        if self._blocks.device.type == "cuda":  # steps that are queued may still save or write these blocks
            self._stream = self._stream or torch.cuda.Stream(self._blocks.device)  # type: ignore[no-untyped-call]
            before = torch.cuda.current_stream(self._blocks.device).record_event()
        return self._thread.submit(_read, order, self._store, self._blocks, self._stream, before)

    def _end(self, load: _Load) -> None:
        error = load.read.exception()
        read, seconds = (0, 0.0) if error is not None else load.read.result()
        if load.connection != self._connection or not self._is_open():
            read = 0  # the slots may have been another's meanwhile
        else:
            self._tell([BlocksRead(load.order.name, read, seconds)])
            if error is not None:
                self._give_up(f"a load failed: {error}")
        if not read:
            self._bad.update(load.order.blocks)
            self._failed.add(load.order.request)

    def _confirm(self, idle: bool) -> None:
        """Say what has reached the shared memory. After an idle step there may be none for long: it waits for all."""
        while self._saves and (idle or self._saves[0].event.query()):
            save = self._saves.pop(0)
            save.event.synchronize()
            if save.connection == self._connection:
                self._tell([save.told])

    def _is_open(self) -> bool:
        self._link.receive()  # the other side says nothing; it may have hung up
        return self._link.number > 0

    def _tell(self, messages: Sequence[Message]) -> None:
        self._link.send(messages)

    def _give_up(self, why: str) -> None:
        """The end of the connection tells that nothing more is moved, so what is queued is done before."""
        if self._blocks is not None and self._blocks.device.type == "cuda":
            torch.cuda.current_stream(self._blocks.device).synchronize()
        self._store = None
        self._link.close(why)


def _read(order: LoadBlocks, store: SlotStore, blocks: LayerBlocks, stream: Any, before: Any) -> tuple[int, float]:
    """On the load thread: how many slots have been read, and in how many seconds."""
    store.check(order.slots)
    began = time.perf_counter()
    if stream is None:
        blocks.copy(order.blocks, order.slots, store, save=False)
    else:
        stream.wait_event(before)
        with torch.cuda.stream(stream):
            try:
                blocks.copy(order.blocks, order.slots, store, save=False)
            finally:
                stream.synchronize()  # what a load that failed has queued must not overwrite what is computed instead
    return len(order.slots), time.perf_counter() - began
