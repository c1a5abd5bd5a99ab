"""A process beside an ingress that notes when NATS delivers each frame.

    python -m benchmarks.ingress._frame_observer URL INBOX FILE

It hears what the ingress hears, at the same time, and does nothing but write down (request, first index, tokens, time).
Ends on SIGTERM, with FILE written: lines of `request index count nanoseconds`, the clock being the machine's monotonic.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import uvloop

from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.errors import CodecError
from kvproto.messages import Tokens


async def main(url: str, inbox: str, file: Path) -> None:
    heard: list[str] = []

    async def on_frames(message: Message) -> None:
        now = time.monotonic_ns()
        try:
            frames = codec.decode_frames(message.data)
        except CodecError:
            return
        heard.extend(f"{one.request} {one.index} {len(one.ids)} {now}" for one in frames if type(one) is Tokens)

    connection = await Connection.open(url, name="observer", inbox_prefix="_adm.observer")
    await connection.subscribe(inbox, on_frames)
    await connection.synced()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    file.write_text("\n".join(heard))
    await connection.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
