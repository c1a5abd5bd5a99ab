"""A bare producer: one prompt over NATS, its tokens as they come. It needs nats-py and msgpack, nothing of kvfleet.

    python examples/nats_producer.py "JULIET: O Romeo," --nats nats://127.0.0.1:4222

A worker that drains hands the request over: frames then have a higher `attempt`, and late ones of the older attempt are
dropped. After lost frames, silence or a retryable failure the request is sent again under its id. The fleet draws the
same tokens for the same id, and `index` says which of them are shown already (docs/streams.md).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import nats

SILENCE_S = 30.0
TRIES = 8


class AskAgainError(Exception):
    """The same request may succeed when it is sent again."""


async def one_try(nc: nats.NATS, subject: str, request: dict[str, Any], shown: int) -> AsyncIterator[list[str]]:
    """Yields the pieces of text of the tokens after the first `shown`. Raises AskAgainError, TimeoutError, or
    ValueError for a request that is refused."""
    inbox = nc.new_inbox()  # one per try: what comes late for an earlier try is not read
    frames = await nc.subscribe(inbox)
    newest = 0
    try:
        await nc.publish(subject, msgpack.packb(request), reply=inbox)
        while True:
            message = await frames.next_msg(timeout=SILENCE_S)
            if not message.data:  # NATS says that nobody subscribes to the subject
                raise AskAgainError("no placement is there")
            frame = msgpack.unpackb(message.data)
            if frame["attempt"] < newest:
                continue
            newest = frame["attempt"]
            if frame["type"] == "failed":
                reason = f"{frame['code']}: {frame['message']}"
                raise AskAgainError(reason) if frame.get("retryable") else ValueError(reason)
            if frame.get("index", 0) > shown or frame.get("output_tokens", 0) > shown:
                raise AskAgainError("frames were lost")
            if frame["type"] == "finished":
                return
            if frame["type"] == "tokens":
                new = frame["text"][shown - frame["index"] :]
                shown += len(new)
                yield new
    finally:
        await frames.unsubscribe()


async def generate(nc: nats.NATS, subject: str, request: dict[str, Any]) -> AsyncIterator[str]:
    """Yields the text, over as many tries as it takes. Raises ValueError."""
    shown = 0
    for _ in range(TRIES):
        try:
            async for pieces in one_try(nc, subject, request, shown):
                shown += len(pieces)
                yield "".join(pieces)
            return
        except (AskAgainError, TimeoutError) as error:
            print(f"\n[{error or 'silence'}; asking again]", file=sys.stderr)
            await asyncio.sleep(1.0)
    raise ValueError(f"given up after {TRIES} tries")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Streams one answer from the fleet over NATS.")
    parser.add_argument("prompt")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--tenant", default="public")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=60)
    said = parser.parse_args()
    request = {"request": uuid.uuid4().hex, "prompt": said.prompt, "max_tokens": said.max_tokens, "temperature": 0.8}
    prefix = f"_prd.{said.tenant}.{request['request']}"  # where NATS lets a producer of the tenant read
    nc = await nats.connect(said.nats, inbox_prefix=prefix, max_reconnect_attempts=-1)
    try:
        async for text in generate(nc, f"kvf.generate.{said.tenant}.{said.model}", request):
            print(text, end="", flush=True)
        print()
    except ValueError as error:
        raise SystemExit(f"\n{error}") from None
    finally:
        await nc.close()


if __name__ == "__main__":
    asyncio.run(main())
