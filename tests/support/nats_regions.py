"""Two servers as child processes, each with a JetStream of its own, joined as hub and leaf node: two regions.

    us (hub) ◀── kvf.region.> and inboxes ──▶ eu (leaf)        cut: the hub's leaf listener goes through a proxy

Clients come in under no name and share the account FLEET of their server. What crosses is deploy/nats's; TLS and nkeys
are not there.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from kvproto.connection import Connection
from kvproto.errors import KvfleetError
from kvproto.testing.nats_process import NatsProcess, ServerFailed, ServerSpec, free_port

JOINED_S = 15.0
LINK_ROLE = Path(__file__).parents[2] / "deploy" / "nats" / "roles" / "region-link.conf"  # what may cross

_COMMON = """
ping_interval: "2s"
ping_max: 2
jetstream: {{ domain: {region}, max_file_store: 1GB, max_memory_store: 64MB }}
no_auth_user: local
"""
_HUB = (
    _COMMON
    + """
include ./region-link.conf
leafnodes {{ listen: "127.0.0.1:{port}", no_advertise: true }}
accounts {{
  FLEET {{
    jetstream: enabled
    users: [
      {{ user: local, password: local }}
      {{ user: link, password: link, permissions: $region_link_may }}
    ]
  }}
}}
"""
)
_LEAF = (
    _COMMON
    + """
leafnodes {{ reconnect: "1s", remotes: [ {{ url: "nats-leaf://link:link@127.0.0.1:{port}", account: FLEET }} ] }}
accounts {{ FLEET {{ jetstream: enabled, users: [ {{ user: local, password: local }} ] }} }}
"""
)


class NatsRegions:
    """Owned by the test that made it: `us` is the hub, `eu` the leaf, both `NatsProcess`es. `link_port` is where the
    leaf looks for the hub, by default `hub_port` itself: a test that cuts the link puts a proxy there."""

    def __init__(
        self, directory: Path, namespace: str = "kvf", *, hub_port: int | None = None, link_port: int | None = None
    ) -> None:
        self.hub_port = hub_port or free_port()
        self.us = self._node(directory, "us", _HUB.format(region="us", port=self.hub_port))
        role = LINK_ROLE.read_text().replace("kvf.", f"{namespace}.")
        (directory / "us" / LINK_ROLE.name).write_text(role)
        self.eu = self._node(directory, "eu", _LEAF.format(region="eu", port=link_port or self.hub_port))

    @staticmethod
    def _node(directory: Path, region: str, text: str) -> NatsProcess:
        folder = directory / region
        folder.mkdir(parents=True)
        config = folder / "region.conf"
        config.write_text(text)
        return NatsProcess(folder, ServerSpec(config))

    def start(self) -> None:
        """Returns when both accept clients; `joined` awaits the link. Raises ServerFailed."""
        try:
            self.us.start()
            self.eu.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.eu.stop()
        self.us.stop()

    async def joined(self, namespace: str = "kvf") -> None:
        """Until a message crosses. Raises ServerFailed."""
        subject = f"{namespace}.region.us.summary"
        here = await Connection.open(self.us.url, name="joined", inbox_prefix="_ing.joined-us")
        there = await Connection.open(self.eu.url, name="joined", inbox_prefix="_ing.joined-eu")
        heard = asyncio.Event()
        try:

            async def hear(message: object) -> None:
                heard.set()

            subscription = await there.subscribe(subject, hear)
            async with asyncio.timeout(JOINED_S):
                while not heard.is_set():
                    await here.publish(subject, json.dumps({}).encode())
                    await asyncio.sleep(0.05)
            await subscription.unsubscribe()
        except (TimeoutError, KvfleetError) as error:
            raise ServerFailed(f"the regions were not joined in {JOINED_S:.0f} s: {error!r}") from None
        finally:
            await here.close()
            await there.close()
