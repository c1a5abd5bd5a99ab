"""Regions as deploy/nats/README.md says to join them: the shipped files, `kvfleet secrets` of each, a CA of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfleet.cli.operator.operator_login import Login
from kvproto.connection import Connection
from kvproto.subjects import inbox_prefix
from kvproto.testing.nats_process import NatsProcess, ServerSpec
from kvservice.membership import tls_context
from kvservice.settings import ServiceSettings
from tests.support.secrets_rig import Secrets, production, tls_url
from tests.support.waiting import LIMIT_S


@dataclass
class RegionServer:
    """One server of a region, in `folder`, not started: a test may change its files first. `kind`: hub or leaf;
    `ports`: leaf listeners of the hub, the first one this server's if it is one; `base`: the file that the region's is
    added to."""

    name: str
    secrets: Secrets
    folder: Path
    kind: str
    ports: Sequence[int]
    link_seed: str
    trusted: Sequence[Secrets]
    base: str = "production.conf"
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = production(self.folder / "nats", self.secrets).parent
        (self.config / "tls/region-ca.crt").write_text("".join(f"{one.text('ca.crt')}\n" for one in self.trusted))
        (self.config / "region-link.nkey").write_text(f"nkey: {self.link_seed}\n")
        (self.config / "main.conf").write_text(f"include ./{self.base}\ninclude ./region-{self.kind}.conf\n")
        self.change("region-hub.conf", "0.0.0.0:7422", f"127.0.0.1:{self.ports[0]}")
        urls = json.dumps([f"tls://localhost:{port}" for port in self.ports])
        environment = self.secrets.nats_env | {"KVF_REGION": self.name, "KVF_LEAF_URLS": urls} | self.variables
        self.process = NatsProcess(self.folder / "run", ServerSpec(self.config / "main.conf", environment))

    def change(self, file: str, old: str, new: str) -> None:
        text = (self.config / file).read_text()
        assert old in text, f"{file} does not say {old!r}"
        (self.config / file).write_text(text.replace(old, new))

    @property
    def url(self) -> str:
        return tls_url(self.process)

    def login(self, user: str) -> dict[str, Any]:
        """As `Connection.open` takes it."""
        settings = ServiceSettings(**self.secrets.nats_tls())  # type: ignore[arg-type]
        return {"nkey_seed": self.secrets.seed(user), "tls": tls_context(settings)}

    def operator(self) -> Login:
        node = {name.removeprefix("nats_"): Path(path) for name, path in self.secrets.nats_tls().items()}
        return Login(self.url, seed_file=Path(self.secrets["nkeys/admin.seed"]), **node)

    async def admin(self) -> Connection:
        return await Connection.open(
            self.url, name="admin", inbox_prefix=inbox_prefix("_adm", self.name), **self.login("admin")
        )


class Ear:
    """What the admin of one region hears of what another one's says."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.heard: dict[str, set[bytes]] = {}

    async def open(self, subjects: Sequence[str]) -> None:
        async def hear(message: Any) -> None:
            self.heard.setdefault(message.subject, set()).add(bytes(message.data))

        for subject in subjects:
            await self._connection.subscribe(subject, hear)
        await self._connection.synced()

    async def hears(self, speaker: Connection, subject: str, data: bytes, seconds: float = LIMIT_S) -> bool:
        """Whether it does, in time, when that is said again and again."""
        end = asyncio.get_running_loop().time() + seconds
        while data not in self.heard.get(subject, ()):
            if asyncio.get_running_loop().time() > end:
                return False
            await speaker.publish(subject, data)
            await asyncio.sleep(0.02)
        return True


async def joined(one: RegionServer, other: RegionServer, seconds: float = LIMIT_S) -> bool:
    """Whether a word crosses, in both directions."""
    here, there = await one.admin(), await other.admin()
    try:
        for speaker, listener in ((here, there), (there, here)):
            ear = Ear(listener)
            await ear.open(["kvf.region.x.joined"])
            if not await ear.hears(speaker, "kvf.region.x.joined", speaker.inbox_prefix.encode(), seconds):
                return False
        return True
    finally:
        await here.close()
        await there.close()
