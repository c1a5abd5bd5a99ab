"""Two bare producers receive 5,000 tokens each over more than a minute, one in msgpack, one in JSON. Run as a program.

    python -m tests.integration.nats.long_streams URL FOLDER     prints one JSON object: what each producer saw

Permissions, and rights to answer that expire, could cut a long stream; nothing else here would. The producers are plain
nats-py; placement and worker are the real processes under their roles, the model is the fake one at a set pace.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import nats

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvproto.ids import new_request_id
from tests.support.processes import Deployment
from tests.support.waiting import LIMIT_S

TOKENS = 5_000
SECONDS = 64.0
USERS = ("admin", "placement", "worker", "sys")


def long_model(folder: Path) -> Path:
    """The demo's tokenizer with a context that holds such a stream."""
    model = folder / "counter"
    shutil.copytree(DEMO_FOLDER, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return model


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
    body = {"prompt": "count", "max_tokens": TOKENS, "ignore_eos": True}
    await nc.publish(
        f"kvf.generate.{tenant}.counter",
        json.dumps(body).encode() if as_json else msgpack.packb(body),
        reply=reply,
        headers={"Content-Type": "application/json"} if as_json else None,
    )
    ids: list[int] = []
    times: list[float] = []
    in_order = True
    while True:
        at, frame = await asyncio.wait_for(frames.get(), LIMIT_S)
        if frame["type"] == "tokens":
            in_order &= frame["index"] == len(ids)
            ids += frame["ids"]
            times.append(at)
        elif frame["type"] != "started":
            break
    await nc.close()
    return {
        "tokens": len(ids),
        "in_order": in_order and frame.get("output_tokens") == len(ids),
        "seconds": round(times[-1] - times[0], 2),
        "largest_gap_s": round(max(b - a for a, b in pairwise(times)), 3),
        "end": frame["type"],
        "errors": errors,
    }


async def both(url: str) -> dict[str, Any]:
    in_msgpack, in_json = await asyncio.gather(
        receive(url, "public", as_json=False), receive(url, "acme", as_json=True)
    )
    return {"msgpack": in_msgpack, "json": in_json}


def main(url: str, folder: Path) -> None:
    fleet = Deployment(url, folder, {user: f"secret-of-{user}" for user in USERS})
    fleet.init()
    rate = 2 * TOKENS / SECONDS
    flags = ["--runner=fake", f"--fake-tokens-per-s={rate}", f"--model={long_model(folder)}"]
    try:
        fleet.start("placement", "p-long")
        fleet.start("worker", "w-long", *flags)
        end = time.monotonic() + LIMIT_S
        while not all("is ready" in service.log.read_text() for service in fleet.services.values()):
            if time.monotonic() > end:
                raise SystemExit(f"not ready: {fleet.logs()}")
            time.sleep(0.1)
        time.sleep(1.0)  # placement hears of the worker
        print(json.dumps(asyncio.run(both(url))))
    finally:
        fleet.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
