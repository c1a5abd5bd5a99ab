"""Loop: vLLM's KV events, every one once and in order, for as long as it lives. Owned by the sidecar's event loop.

    next in order ───────────────────────────────────────────▶ taken
    a later one: some were lost ──▶ replay from the first lost ──▶ taken, all of them
    an earlier one, or `restarted`: another process ──▶ all is cleared ──▶ replay from 0 ──▶ taken
    lost for good (the replay has less) ──▶ all is cleared, what follows is taken

vLLM numbers its batches from 0, keeps the last 10,000 for a replay, and drops silently what a subscriber is too slow
for. What it tells before it has this subscriber is lost the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from kvproto.errors import Unavailable

log = logging.getLogger(__name__)

REPLAY_S = 5.0  # for the next part of a replay
HIGH_WATER = 100_000  # batches that wait here while the loop is busy

Event = Mapping[str, Any]


@dataclass(eq=False)
class KvEventFeed:
    """`endpoint` is where this end binds, and vLLM connects (`binds`), or the other way round. `on_events` gets the
    events of a batch, and `on_cleared` hears that nothing told before holds any more."""

    endpoint: str
    replay_endpoint: str
    topic: str
    binds: bool
    on_events: Callable[[Sequence[Event]], None]
    on_cleared: Callable[[], None]
    batches_total: int = 0
    replays_total: int = 0
    malformed_total: int = 0
    anew_total: int = 0  # times that another process seemed to begin
    is_replay: bool = False  # what is told just now came by a replay
    _context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _next: int = 0

    def restarted(self) -> None:
        """vLLM is another process now, whose numbers begin at 0 and may have passed those of the last one."""
        self._clear(0)

    def open(self) -> None:
        """Then `run` it. Raises Unavailable."""
        self._socket = socket = self._context.socket(zmq.SocketType.SUB)
        socket.setsockopt(zmq.SocketOption.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.SocketOption.LINGER, 0)
        socket.setsockopt_string(zmq.SocketOption.SUBSCRIBE, self.topic)
        try:
            (socket.bind if self.binds else socket.connect)(self.endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise Unavailable(f"cannot take vLLM's KV events at {self.endpoint}: {error.strerror}") from None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._take(await self._socket.recv_multipart())
        finally:
            self._context.destroy(linger=0)

    async def _take(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or frames[0].decode(errors="replace") != self.topic or len(frames[1]) != 8:
            self.malformed_total += 1
            return
        (number,) = struct.unpack(">Q", frames[1])
        if number < self._next:
            log.info("vLLM's KV events begin anew: it is another process")
            self.anew_total += 1
            self._clear(0)
        if number > self._next:
            await self._replay(number)
        if number == self._next:  # else the replay had it
            self._apply(number, frames[2])

    def _clear(self, following: int) -> None:
        self._next = following
        self.on_cleared()

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self.batches_total += 1
        try:
            _, events, *_ = msgpack.unpackb(payload, raw=False, strict_map_key=False)
            self.on_events(events)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.malformed_total += 1
            log.warning(
                "vLLM told something about its blocks that is not understood: %s: %s", type(error).__name__, error
            )
            self._clear(self._next)

    async def _replay(self, until: int) -> None:
        """Take the batches from the next one up to `until`, which is not taken. What is not there is gone."""
        self.replays_total += 1
        self.is_replay = True
        try:
            await self._ask_again(until)
        finally:
            self.is_replay = False
        if self._next < until:
            log.warning("KV events %d to %d of vLLM are lost: its blocks are learnt anew", self._next, until - 1)
            self._clear(until)

    async def _ask_again(self, until: int) -> None:
        with self._context.socket(zmq.SocketType.DEALER) as socket:
            socket.setsockopt(zmq.SocketOption.LINGER, 0)
            socket.connect(self.replay_endpoint)
            await socket.send_multipart([b"", struct.pack(">Q", self._next)])
            with contextlib.suppress(TimeoutError, struct.error, IndexError):  # nobody answers, or somebody else
                while self._next < until:
                    frames = await asyncio.wait_for(socket.recv_multipart(), REPLAY_S)
                    (number,) = struct.unpack(">q", frames[-2])
                    if number < 0:  # the end
                        break
                    if number == self._next:
                        self._apply(number, frames[-1])
                    elif number > self._next:
                        break
