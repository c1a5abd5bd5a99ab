"""Three servers as child processes, one JetStream cluster: any of them may be killed, hung, retired or started again.

Clients need no name and share the account FLEET; `sys` with password `sys` is the system account's user.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvproto.connection import Connection
from kvproto.errors import KvfleetError
from kvproto.testing.nats_process import NatsProcess, ServerFailed, ServerSpec, free_ports

SYSTEM_USER = SYSTEM_PASSWORD = "sys"
SIZE = 3
LEADER_TIMEOUT_S = 30.0

_CONFIG = """
ping_interval: "2s"
ping_max: 2
lame_duck_duration: "30s"
lame_duck_grace_period: "10ms"
jetstream: {{ max_file_store: 1GB, max_memory_store: 64MB }}
cluster {{
  name: test
  listen: "127.0.0.1:{own}"
  routes: [{routes}]
}}
accounts {{
  FLEET {{ jetstream: enabled, users: [ {{ user: local, password: local }} ] }}
  SYS {{ users: [ {{ user: sys, password: sys }} ] }}
}}
system_account: SYS
no_auth_user: local
"""


class NatsCluster:
    """Owned by the test that made it. `nodes` are `NatsProcess`es: kill, hang, wake and start them as such."""

    def __init__(self, directory: Path) -> None:
        routes = free_ports(SIZE)
        self.nodes: list[NatsProcess] = []
        for number, own in enumerate(routes):
            folder = directory / f"n{number}"
            folder.mkdir(parents=True)
            config = folder / "cluster.conf"
            others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes if port != own)
            config.write_text(_CONFIG.format(own=own, routes=others))
            self.nodes.append(NatsProcess(folder, ServerSpec(config)))

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    @property
    def url(self) -> str:
        """All URLs, as settings of services have them."""
        return ",".join(self.urls)

    def start(self) -> None:
        """Returns when every server accepts clients; `ready` awaits a leader. Raises ServerFailed."""
        try:
            for node in self.nodes:
                node.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    async def ready(self, streams: Iterable[str] = ()) -> None:
        """Until JetStream and each stream have a leader. Raises ServerFailed after 30 s."""
        await self._ask("$JS.API.INFO")
        for stream in streams:
            await self.leader_of(stream)

    async def leader_of(self, stream: str) -> NatsProcess:
        """Waits for an election. Raises ServerFailed after 30 s."""
        name = await self._ask(f"$JS.API.STREAM.INFO.{stream}", leads=True)
        return next(node for node in self.nodes if node.name == name)

    def node_at(self, url: str) -> NatsProcess:
        """The server that listens at `host:port`."""
        return next(node for node in self.nodes if node.url.endswith(f":{url.rsplit(':', 1)[-1]}"))

    def others(self, node: NatsProcess) -> list[NatsProcess]:
        return [other for other in self.nodes if other is not node]

    async def _ask(self, subject: str, *, leads: bool = False) -> str:
        """Ask until the answer is no error, and with `leads` names a leader that is up. Returns the leader's name."""
        last: Any = "no server is up"
        up = {node.name: node.url for node in self.nodes if node.pid is not None}
        try:
            async with asyncio.timeout(LEADER_TIMEOUT_S):
                connection = await Connection.open(list(up.values()), name="cluster", inbox_prefix="_adm.cluster")
                try:
                    while True:
                        try:
                            last = json.loads((await connection.request(subject, b"", 1.0)).data)
                        except (KvfleetError, TimeoutError) as error:
                            last = error
                        else:
                            leader = (last.get("cluster") or {}).get("leader", "")
                            if "error" not in last and (not leads or leader in up):
                                return str(leader)
                        await asyncio.sleep(0.05)
                finally:
                    await connection.close()
        except TimeoutError:
            raise ServerFailed(f"no leader answers on {subject} in {LEADER_TIMEOUT_S:.0f} s: {last}") from None
