"""vLLM's publisher of KV events: numbers from 0 with each process, a replay socket, silent drops."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgpack
import zmq
import zmq.asyncio

KEPT = 10_000  # batches
AGAIN_MS = 5  # the real one tries every 100 ms to connect


class EventPublisher:
    """One process of vLLM. It connects to `endpoint`, or `binds` it, and always binds the replay endpoint."""

    def __init__(self, endpoint: str, replay: str, topic: str = "kv", *, binds: bool = False, kept: int = KEPT) -> None:
        self.topic = topic.encode()
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.RECONNECT_IVL, AGAIN_MS)
        self._pub.setsockopt(zmq.LINGER, 0)
        (self._pub.bind if binds else self._pub.connect)(endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(replay)
        self._said: list[tuple[int, bytes]] = []
        self._kept = kept
        self.number = 0
        self._task = asyncio.create_task(self._answer())

    async def say(self, events: Sequence[Any], *, heard: bool = True, payload: bytes | None = None) -> None:
        packed = payload if payload is not None else msgpack.packb([1.5, list(events), 0])
        number, self.number = self.number, self.number + 1
        self._said = [*self._said, (number, packed)][-self._kept :]
        if heard:
            await self.send(number, packed)

    async def say_first_again(self) -> None:
        await self.send(*self._said[0])

    async def send(self, number: int, packed: bytes) -> None:
        await self.send_frames(self.topic, struct.pack(">Q", number), packed)

    async def send_frames(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def _answer(self) -> None:
        while True:
            peer, _, start = await self._router.recv_multipart()
            for number, packed in self._said:
                if number >= struct.unpack(">Q", start)[0]:
                    await self._router.send_multipart([peer, b"", self.topic, struct.pack(">Q", number), packed])
            await self._router.send_multipart([peer, b"", b"", struct.pack(">q", -1), b""])

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)
