"""Loop: what runs inside vLLM tells the worker, over two Unix sockets of the worker's. Owned by its event loop.

connector, in the scheduler ──stream───▶ VllmNews      hello, scheduled, steps, erased, blocks to be saved
connector, in each worker ────stream───▶ VllmNews      hello, blocks that were saved or read
sampler, beside the model ──datagrams──▶ DrawFailures  tokens that could not be drawn, before vLLM tells them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgpack

from kvfleet.worker.vllm.foreign_blocks import ForeignHash
from kvfleet_vllm.wire import (
    ERASE_HASHES,
    VERSION,
    BlocksErased,
    BlocksRead,
    BlocksSaved,
    BlocksSaving,
    Decoder,
    EngineHello,
    EngineStep,
    EraseBlocks,
    GrantSlots,
    Scheduled,
    StateSaving,
    WorkerHello,
    encode,
)
from kvproto.errors import EngineFailure, KvfleetError, Unavailable, from_code

log = logging.getLogger(__name__)

Told = Scheduled | EngineStep | BlocksSaving | StateSaving | BlocksSaved | BlocksRead

PART = 1 << 16
ERASE_S = 5.0
LOST_S = 0.5  # until a worker's connection that ended is missed: it may be another, or vLLM's end
ACCEPT_TURNS = 4  # of the event loop, from a connection to its writer
MAX_FAILURES = 1024  # of requests that nobody asked about


@dataclass(eq=False)
class VllmNews:
    """One scheduler at a time: a new connection replaces the last. `on_gone` hears of an end that the other side made.
    `workers` have greeted, by rank, and are there; `on_worker` hears of each.

    A worker whose connection ended comes back with the scheduler's next one: that is ended too, and `on_lost` called.
    """

    path: Path
    on_hello: Callable[[EngineHello], None]
    on_told: Callable[[Told], None]
    on_gone: Callable[[str], None]
    on_worker: Callable[[], None]
    on_lost: Callable[[], None]
    workers: dict[int, WorkerHello] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _open: dict[asyncio.StreamWriter, asyncio.Task[None]] = field(default_factory=dict)
    _writer: asyncio.StreamWriter | None = None
    _erasing: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    async def listen(self) -> None:
        """Raises Unavailable."""
        self.path.unlink(missing_ok=True)
        try:
            self._server = await asyncio.start_unix_server(self._accept, self.path)
        except OSError as error:
            raise Unavailable(f"cannot listen at {self.path}: {error.strerror}") from None

    async def close(self) -> None:
        if self._server is not None:
            self.path.unlink(missing_ok=True)
            for _ in range(ACCEPT_TURNS):  # a server that is closed meanwhile loses who is being accepted
                await asyncio.sleep(0)
            self._server.close()
        self.hang_up()
        for writer in self._open:
            writer.close()

    def hang_up(self) -> None:
        """The other side comes back with the next request."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for future in self._erasing.values():
            if not future.done():
                future.set_exception(EngineFailure("vLLM's connector is gone"))

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def erase(self, hashes: Sequence[ForeignHash]) -> int:
        """Returns how many blocks vLLM forgot; it reads this with its next step or request. Raises EngineFailure."""
        if self._writer is None:
            raise EngineFailure("vLLM's connector is away")
        waiting = []
        for at in range(0, len(hashes) or 1, ERASE_HASHES):
            number = next(self._numbers)
            self._erasing[number] = asyncio.get_running_loop().create_future()
            waiting.append(number)
            self._writer.write(encode([EraseBlocks(number, tuple(hashes[at : at + ERASE_HASHES]))]))
        try:
            async with asyncio.timeout(ERASE_S):
                return sum(await asyncio.gather(*(self._erasing[number] for number in waiting)))
        except TimeoutError:
            raise EngineFailure("vLLM's connector does not answer") from None
        finally:
            for number in waiting:
                self._erasing.pop(number, None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._open[writer] = asyncio.create_task(self._serve(reader, writer))
        task.add_done_callback(lambda _: self._open.pop(writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder, greeted, why = Decoder(), False, "its connector hung up"
        worker: WorkerHello | None = None
        try:
            while data := await reader.read(PART):
                for message in decoder.feed(data):
                    if isinstance(message, EngineHello):
                        self.hang_up()
                        self._writer, greeted = writer, True
                        self.on_hello(message)
                    elif isinstance(message, WorkerHello):
                        worker = self.workers[message.rank] = message
                        self.on_worker()
                    elif worker is not None or self._writer is writer:
                        self._hear(message)
        except (OSError, ValueError) as error:
            why = f"its connector cannot be read: {error}"
        except asyncio.CancelledError:  # the loop ends, and this is the task's top
            greeted = False
        finally:
            writer.close()
            if worker is not None and self.workers.get(worker.rank) is worker:
                del self.workers[worker.rank]
                asyncio.get_running_loop().call_later(LOST_S, self._look_after, worker.rank, self._writer)
            if greeted and self._writer is writer:
                self.hang_up()
                self.on_gone(why)

    def _look_after(self, rank: int, scheduler: asyncio.StreamWriter | None) -> None:
        if scheduler is not None and self._writer is scheduler and rank not in self.workers:
            self.hang_up()
            self.on_lost()

    def grant(self, slots: Sequence[int]) -> bool:
        """Whether vLLM is there to have them."""
        if self._writer is not None:
            self._writer.write(encode([GrantSlots(tuple(slots))]))
        return self._writer is not None

    def _hear(self, message: object) -> None:
        if isinstance(message, Told):
            self.on_told(message)
        elif isinstance(message, BlocksErased):
            future = self._erasing.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.blocks)


def problem_of(hello: EngineHello) -> str | None:
    if hello.version != VERSION:
        return (
            f"its connector is of version {hello.version}, this worker of {VERSION}: install the same kvfleet on both"
        )
    return None


@dataclass(eq=False)
class DrawFailures:
    """Raises Unavailable where it cannot listen."""

    path: Path
    _known: OrderedDict[str, tuple[int, KvfleetError]] = field(default_factory=OrderedDict)  # by vLLM's name

    def __post_init__(self) -> None:
        self.path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(str(self.path))
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"cannot listen at {self.path}: {error.strerror}") from None

    def of(self, name: str, index: int) -> KvfleetError | None:
        """Why the token of this generated index could not be drawn. It was told before the token could come."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._note(self._socket.recv(PART))
        known = self._known.get(name)
        return self._known.pop(name)[1] if known is not None and known[0] == index else None

    def _note(self, datagram: bytes) -> None:
        try:
            name, _, index, code, message = msgpack.unpackb(datagram)
            self._known[name] = index, from_code(code, message)
        except (ValueError, TypeError) as error:
            log.warning("vLLM's sampler told something that is not understood: %s", error)
        while len(self._known) > MAX_FAILURES:
            self._known.popitem(last=False)

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
