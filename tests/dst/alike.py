"""The behaviours of NATS on the simulated server: a line of JSON for each says what went wrong."""

from __future__ import annotations

import json
import traceback
from unittest import mock

from kvproto import connection as product
from tests.dst import nats_behaviours, threads
from tests.dst.hub import Hub
from tests.dst.loop import SimLoop
from tests.dst.nats_link import Net, SimClient
from tests.dst.nats_server import SYSTEM, May, SimNats, User

AT = "127.0.0.1:4222"
USERS = {
    "admin": User("admin", May()),
    "worker": User("worker", May(["free.>", "_adm.>"], ["free.>", "_adm.>"])),
    "sys": User("sys", May(), SYSTEM),
}


def run(name: str, seed: int) -> str:
    """What went wrong."""
    hub = Hub(seed)
    threads.begin(hub)
    net = SimClient.net = Net(hub)
    net.servers[AT] = SimNats(hub, f"nats://{AT}", USERS)
    stage = nats_behaviours.Stage(net.servers[AT])
    loop = SimLoop(hub.place(name))

    async def work() -> None:
        await nats_behaviours.BEHAVIOURS[name](stage)
        await stage.close()

    with mock.patch.object(product, "_Client", SimClient):
        hub.here = loop.place
        task = loop.create_task(work())
        try:
            hub.run(task.done, 600.0)
            task.result()
            assert not loop.unhandled, loop.unhandled
        except Exception:  # noqa: BLE001 - whatever it is, it is told
            return traceback.format_exc()
        finally:
            hub.close()
    return ""


def main(names: list[str]) -> int:
    for name in names or nats_behaviours.BEHAVIOURS:
        print(json.dumps({"name": name, "wrong": run(name, 1)}))
    return 0
