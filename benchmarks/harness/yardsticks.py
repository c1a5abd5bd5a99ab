"""Yardsticks: what this machine takes, in this same run, for the hops and bytes alone, with no code of kvfleet between.

    Hops                HTTP by the same server, a NATS request to a process and another, whose answer is written as an
                        event: what ingress, placement and worker cannot do without
    relayed_ms          many streams at once through one process that writes each message of NATS as an event
    messages_per_s      NATS messages that one nats-py subscriber counts
    tokens_per_s        msgpack off, JSON on, joined to an event: what a plain loop does for each token of a stream

A floor that is a ratio to one of them means the same on a slow machine and on a busy one.

    python -m benchmarks.harness.yardsticks serve NATS_URL PORT | answer NATS_URL | publish NATS_URL COUNT |
                                     relay NATS_URL PORT | pace NATS_URL STREAMS PER_S AT_ONCE
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import msgpack
import nats
import orjson
import uvicorn
import uvloop

from benchmarks.harness.http import Connection
from kvfleet.cli.embedded import embedded_nats
from kvproto.testing.nats_process import free_port

PLACE, GENERATE, TOKENS = "yardstick.place", "yardstick.generate", "yardstick.tokens"
RELAYED = "yardstick.relayed"
SETTLED_S = 3.0
PLACED = b"p" * 200  # bytes of an answer of placement
FRAMES = b"f" * 120  # of a worker's first frames
FRAME = msgpack.packb(["t", "vppkeehnzs2676ab43zauajdmm", 0, 0, 17, [812], [" light"], []])
MARK = b'"text":"'
EVENT = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":"a"}]}\n\n'


class Hops:
    """Two processes over a NATS server of their own; `ttft` is one request through them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._nats = embedded_nats.start(folder, folder / "nats.log")
        self._port = free_port()
        self._children = [_start("answer", self._nats.url), _start("serve", self._nats.url, self._port)]
        self.url = self._nats.url
        self._connection = Connection(f"http://127.0.0.1:{self._port}")

    def __enter__(self) -> Hops:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in self._children:
            child.terminate()
            child.wait(10)
        self._nats.child.signal(signal.SIGTERM)
        self._nats.child.process.wait(10)
        self._folder.cleanup()

    async def ttft(self, body: dict[str, Any]) -> float:
        """Seconds until the first event of an answer."""
        return (await self._connection.stream("/", body, MARK))[0]

    async def close(self) -> None:
        await self._connection.close()


def tokens_per_s(count: int = 100_000) -> float:
    """Per second of CPU time, the best of three."""
    took = []
    for _ in range(3):
        out: list[bytes] = []
        began = time.process_time()
        for _ in range(count):
            frame = msgpack.unpackb(FRAME)
            out += (EVENT[:70], orjson.dumps(frame[6][0]), EVENT[-6:])
            if len(out) > 300:
                b"".join(out)
                out.clear()
        took.append(time.process_time() - began)
    return count / min(took)


def messages_per_s(url: str, count: int = 50_000) -> float:
    """Messages of a token's size, published as fast as NATS takes them; the median of three times."""
    rate: float = uvloop.run(_messages_per_s(url, count))
    return rate


async def _messages_per_s(url: str, count: int) -> float:
    client = await nats.connect(url)
    rates: list[float] = []
    for _ in range(3):
        done = asyncio.Event()
        times: list[float] = []

        async def on(message: Any, times: list[float] = times, done: asyncio.Event = done) -> None:
            times.append(time.perf_counter())
            if len(times) == count:
                done.set()

        subscription = await client.subscribe(TOKENS, cb=on, pending_msgs_limit=-1, pending_bytes_limit=-1)
        await client.flush()
        publisher = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.harness.yardsticks", "publish", url, str(count)
        )
        async with asyncio.timeout(120):
            await done.wait()
        await publisher.wait()
        await subscription.unsubscribe()
        rates.append(count / (times[-1] - times[0]))
    await client.close()
    return median(rates)


def relayed_ms(streams: int, per_s: float, at_once: int, seconds: float) -> list[float]:
    """How long messages take from their publisher to the HTTP client: all that come in so many seconds. They are
    published as workers do: after a step, for `at_once` streams."""
    with tempfile.TemporaryDirectory() as made:
        server = embedded_nats.start(Path(made), Path(made) / "nats.log")
        port = free_port()
        children = [_start("relay", server.url, port)]
        try:
            return uvloop.run(_relayed(server.url, port, children, (streams, per_s, at_once), seconds))
        finally:
            for child in children:
                child.kill()  # the relay would wait for its streams
                child.wait(10)
            server.child.signal(signal.SIGTERM)
            server.child.process.wait(10)


async def _relayed(
    url: str, port: int, children: list[subprocess.Popen[str]], pace: tuple[int, float, int], seconds: float
) -> list[float]:
    delays: list[float] = []

    async def read(stream: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /{stream} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        while line := await reader.readline():
            if line.startswith(b"data: "):
                delays.append((time.monotonic_ns() - int(line[6:])) / 1e6)
        writer.close()

    reading = [asyncio.create_task(read(stream)) for stream in range(pace[0])]
    await asyncio.sleep(SETTLED_S)
    children.append(_start("pace", url, *pace))
    await asyncio.sleep(SETTLED_S)
    delays.clear()
    await asyncio.sleep(seconds)
    found = list(delays)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return found


# ---------------------------------------------------------------------------------------------- processes


async def _relay(url: str, port: int) -> None:
    client = await nats.connect(url)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        messages: asyncio.Queue[bytes] = asyncio.Queue()

        async def on(message: Any) -> None:
            messages.put_nowait(message.data)

        await client.subscribe(f"{RELAYED}{scope['path'].replace('/', '.')}", cb=on)
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        while True:
            body = b"data: " + await messages.get() + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

    await _serving(app, port)


async def _pace(url: str, streams: int, per_s: float, at_once: int) -> None:
    """To each stream so many a second."""
    client = await nats.connect(url)
    print("ready", flush=True)
    began, sent = time.monotonic(), 0
    while True:
        for stream in range(sent, sent + at_once):
            await client.publish(f"{RELAYED}.{stream % streams}", str(time.monotonic_ns()).encode())
        sent += at_once
        await client.flush()
        await asyncio.sleep(max(0.0, began + sent / (streams * per_s) - time.monotonic()))


def _start(what: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.harness.yardsticks", what, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", f"{what} did not start"
    return process


async def _serve(url: str, port: int) -> None:
    client = await nats.connect(url)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        said = msgpack.packb(orjson.loads(body))
        await client.request(PLACE, said, timeout=10)
        await client.request(GENERATE, said, timeout=10)
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    await _serving(app, port)


async def _serving(app: Any, port: int) -> None:
    config = uvicorn.Config(app, port=port, http="httptools", lifespan="off", log_level="error", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await serving


async def _answer(url: str) -> None:
    """Placement and worker in one process: they never work at once for one request."""
    client = await nats.connect(url)

    def answering(data: bytes) -> Any:
        async def on(message: Any) -> None:
            msgpack.unpackb(message.data)
            await message.respond(data)

        return on

    await client.subscribe(PLACE, cb=answering(PLACED))
    await client.subscribe(GENERATE, cb=answering(FRAMES))
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _publish(url: str, count: int) -> None:
    client = await nats.connect(url)
    for at in range(count):
        await client.publish(TOKENS, FRAME)
        if at % 500 == 499:
            await client.flush()
    await client.close()


def main() -> None:
    what, url, *number = sys.argv[1:]
    if what == "serve":
        uvloop.run(_serve(url, int(number[0])))
    elif what == "answer":
        uvloop.run(_answer(url))
    elif what == "relay":
        uvloop.run(_relay(url, int(number[0])))
    elif what == "pace":
        uvloop.run(_pace(url, int(number[0]), float(number[1]), int(number[2])))
    else:
        uvloop.run(_publish(url, int(number[0])))


if __name__ == "__main__":
    main()
