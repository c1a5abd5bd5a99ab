"""The behaviours of NATS on the simulated server: a line of JSON for each says what went wrong."""

from __future__ import annotations

import json
import traceback
from unittest import mock

from kvproto import connection as product
from kvproto.connection import Connection
from tests.dst import nats_behaviours, threads
from tests.dst.hub import Hub
from tests.dst.loop import SimLoop
from tests.dst.nats_link import Net, SimClient
from tests.dst.nats_server import May, SimNats

AT = "127.0.0.1:4222"
USERS = {"admin": ("admin", May()), "worker": ("worker", May(["free.>", "_adm.>"], ["free.>", "_adm.>"]))}


class SimStage:
    def __init__(self, hub: Hub, server: SimNats) -> None:
        self._hub, self.server = hub, server
        self.opened: list[Connection] = []

    async def open(self, name: str, user: str = "admin", password: str | None = None) -> Connection:
        made = await Connection.open(
            f"nats://{AT}", name=name, inbox_prefix=f"_adm.{name}", user=user, password=password or user
        )
        self.opened.append(made)
        return made

    def hang(self) -> None:
        self.server.hang()

    def wake(self) -> None:
        self.server.wake()

    async def kill(self) -> None:
        self.server.stop()

    async def start(self) -> None:
        self.server.start()


def run(name: str, seed: int) -> str:
    """What went wrong."""
    hub = Hub(seed)
    threads.begin(hub)
    net = SimClient.net = Net(hub)
    server = net.servers[AT] = SimNats(hub, USERS)
    stage = SimStage(hub, server)
    loop = SimLoop(hub.place(name))

    async def work() -> None:
        await nats_behaviours.BEHAVIOURS[name](stage)
        for one in stage.opened:
            await one.close()

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
