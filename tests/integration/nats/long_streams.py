"""Two bare producers receive 5,000 tokens each over more than a minute, one in msgpack, one in JSON. Run as a program.

    python long_streams.py URL        prints one JSON object: what each producer saw

Permissions, and rights to answer that expire, could cut a long stream; nothing else here would. The producers are plain
nats-py. What answers them is `SmallFleet`; a real placement and worker on the same server can take its place.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgpack
import nats

from kvproto import codec
from kvproto import messages as m
from kvproto.connection import Connection, is_json
from kvproto.ids import new_request_id
from kvproto.subjects import PLACEMENT_INBOX, WORKER_INBOX, Subjects, inbox_prefix

TOKENS = 5_000
SECONDS = 62.0
S = Subjects()


class SmallFleet:
    """A placement that forwards and a worker that counts, each under its own role."""

    def __init__(self, placement: Connection, worker: Connection) -> None:
        self._placement = placement
        self._worker = worker
        self._streams: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def running(cls, url: str) -> AsyncIterator[SmallFleet]:
        placement = await _connect(url, "placement", inbox_prefix(PLACEMENT_INBOX, "p1"))
        worker = await _connect(url, "worker", inbox_prefix(WORKER_INBOX, "w1"))
        fleet = cls(placement, worker)
        await placement.subscribe(S.generate_all(), fleet._forward, queue="placement")
        await worker.subscribe(S.worker_generate_all("w1"), fleet._accept)
        await asyncio.gather(placement.synced(), worker.synced())
        try:
            yield fleet
        finally:
            await asyncio.gather(*fleet._streams)
            await asyncio.gather(placement.close(), worker.close())

    async def _forward(self, message: Any) -> None:
        as_json = is_json(message)
        asked = codec.decode_plain(m.ProducerRequest, message.data, as_json=as_json)
        tenant, model = message.subject.split(".")[-2:]
        request = m.GenerateRequest(
            request=new_request_id(),
            attempt=0,
            model=model,
            sampling=m.Sampling(max_tokens=asked.max_tokens),
            inbox=message.reply,
            prompt=asked.prompt,
            encoding=m.Encoding.JSON if as_json else m.Encoding.MSGPACK,
        )
        reply = f"{self._placement.inbox_prefix}.{request.request}"
        await self._placement.publish(S.worker_generate("w1", tenant), codec.encode(request), reply=reply)

    async def _accept(self, message: Any) -> None:
        request = codec.decode(m.GenerateRequest, message.data)
        accepted = m.Accepted(request.request, request.attempt, "w1", "epoch")
        await self._worker.publish(message.reply, codec.encode_frames([accepted]))
        stream = asyncio.create_task(self._stream(request))
        self._streams.add(stream)

    async def _stream(self, request: m.GenerateRequest) -> None:
        key = (request.request, request.attempt)
        count = request.sampling.max_tokens
        began = time.monotonic()
        await self._send(request, m.Started(*key, "w1", 3, {}))
        for index in range(count):
            await asyncio.sleep(began + SECONDS * index / (count - 1) - time.monotonic())
            await self._send(request, m.Tokens(*key, 0, index, (index,), (f"{index} ",)))
        await self._send(request, m.Finished(*key, m.FinishReason.LENGTH, 3, count))

    async def _send(self, request: m.GenerateRequest, frame: m.Frame) -> None:
        data = codec.encode_plain_frame(frame, as_json=request.encoding is m.Encoding.JSON)
        await self._worker.publish(request.inbox, data)


async def receive(url: str, tenant: str, *, as_json: bool) -> dict[str, Any]:
    """A bare producer: one request, then frames until a terminal one."""
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    user = f"producer-{tenant}"
    inbox = f"_prd.{tenant}.{new_request_id()}"
    nc = await nats.connect(
        url, user=user, password=f"secret-of-{user}", inbox_prefix=inbox.encode(), error_cb=on_error
    )
    frames: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

    async def on_frame(message: Any) -> None:
        frame = json.loads(message.data) if as_json else msgpack.unpackb(message.data)
        frames.put_nowait((time.monotonic(), frame))

    reply = f"{inbox}.frames"
    await nc.subscribe(reply, cb=on_frame)
    body = {"prompt": "count", "max_tokens": TOKENS}
    await nc.publish(
        f"kvf.generate.{tenant}.counter",
        json.dumps(body).encode() if as_json else msgpack.packb(body),
        reply=reply,
        headers={"Content-Type": "application/json"} if as_json else None,
    )
    ids: list[int] = []
    times: list[float] = []
    text = ""
    while True:
        at, frame = await asyncio.wait_for(frames.get(), 20)
        if frame["type"] == "tokens":
            ids += frame["ids"]
            text += "".join(frame["text"])
            times.append(at)
        elif frame["type"] != "started":
            break
    await nc.close()
    return {
        "tokens": len(ids),
        "in_order": ids == list(range(TOKENS)) and text == "".join(f"{i} " for i in range(TOKENS)),
        "seconds": round(times[-1] - times[0], 2),
        "largest_gap_s": round(max(b - a for a, b in pairwise(times)), 3),
        "end": frame["type"],
        "errors": errors,
    }


async def _connect(url: str, user: str, prefix: str) -> Connection:
    return await Connection.open(url, name=user, inbox_prefix=prefix, user=user, password=f"secret-of-{user}")


async def main(url: str) -> None:
    async with SmallFleet.running(url):
        in_msgpack, in_json = await asyncio.gather(
            receive(url, "public", as_json=False), receive(url, "acme", as_json=True)
        )
    print(json.dumps({"msgpack": in_msgpack, "json": in_json}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
