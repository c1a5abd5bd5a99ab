"""What the client itself costs: its CPU time for each token of a null server, which sends prepared bytes alone.

python -m kvservice.launch kvfleet.cli.bench.overhead    is that server: prints its port; ends when its stdin does
"""

from __future__ import annotations

import asyncio
import sys
import time

import httpx
import orjson
import uvloop

from kvfleet.cli.bench.connection import StreamConnections
from kvfleet.cli.bench.load_run import BenchAsk, LoadRun
from kvfleet.cli.bench.shapes import LoadLimits, Shape, ShapeSizes, sessions
from kvservice import launch

STREAMS = 8
TOKENS = 200
STEP_S = 0.005
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1700000000,
    "model": "null",
}  # fmt: skip


async def measure() -> float:
    """The share of a core per 1,000 tokens/s, each token in a packet of its own. Raises OSError."""
    server = await asyncio.create_subprocess_exec(
        *launch.command("kvfleet.cli.bench.overhead"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        port = int(await server.stdout.readline() or 0)
        run = LoadRun(
            StreamConnections(httpx.URL(f"http://127.0.0.1:{port}")),
            BenchAsk("null", is_chat=True, timeout_s=30.0),
            LoadLimits(requests=STREAMS, duration_s=None, concurrency=STREAMS),
        )
        before = time.process_time()
        await run.load(sessions(Shape.ONESHOT, ShapeSizes(0, 100, TOKENS, 1, 1, 0.0), 0, 1.0, 0))
        spent = time.process_time() - before
    finally:
        server.stdin.close()
        await server.wait()
    if run.errors:
        raise OSError(f"the null server: {run.records[0].told}")
    return share(spent, run.meter.events)


def share(cpu_s: float, tokens: int) -> float:
    """Seconds of CPU per 1,000 tokens: the share of a core at 1,000 tokens/s."""
    return 1000 * cpu_s / tokens


def _event(**fields: object) -> bytes:
    data = b"data: " + orjson.dumps({**CHUNK, **fields}) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = _event(choices=[{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}])


def _end(tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    stop = _event(choices=[{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}])
    return stop + _event(choices=[], usage=usage) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            tokens = orjson.loads(await reader.readexactly(length))["max_tokens"]
            began = loop.time()
            for number in range(tokens):
                writer.write(HEAD + TOKEN if number == 0 else TOKEN)
                await asyncio.sleep(began + (number + 1) * STEP_S - loop.time())
            writer.write(_end(tokens))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _until_stdin_ends() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    uvloop.run(_until_stdin_ends())
