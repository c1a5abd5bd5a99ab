"""What the page's tests look at: real worker loops around the fake runner, a real placement, and ingresses."""

from __future__ import annotations

from typing import Any

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.placement.loop import PlacementLoop
from kvproto.connection import Connection
from kvproto.subjects import Subjects
from tests.integration.ingress.ingress_rig import FLEET_KEY, Served, serve, start_placement, until
from tests.support.fake_fleet import FakeFleet

# The fake runner draws end tokens as any others: what is to be seen to its end, or stopped, must not end before.
GO_ON = """
const asked = window.fetch;
window.fetch = (url, how) => {
  if (how?.body) how.body = JSON.stringify({ ...JSON.parse(how.body), ignore_eos: true });
  return asked(url, how);
};
"""
EVIL = "<img src=x onerror=document.title='taken'>"
KEYS = "".join(
    f'[[keys]]\nname = "{name}"\nsha256 = "{hash_key(name)}"\ntenant = "{tenant}"\n{more}\n'
    for name, tenant, more in (("alice", "acme", ""), ("bob", "other", ""), ("root", "ops", "admin = true"))
)


class PageFleet:
    """Two workers of the fake runner, one of a model whose name would be markup, a placement; ingresses on demand."""

    def __init__(self, nats_url: str, subjects: Subjects) -> None:
        self.nats_url = nats_url
        self.subjects = subjects
        self.workers = FakeFleet(nats_url, subjects)
        self.served: list[Served] = []
        self.placement: tuple[PlacementLoop, Connection] | None = None

    async def start(self) -> None:
        self.placement = await start_placement(self.nats_url, self.subjects, "p0")
        await self.workers.start("w0", fleet_key=FLEET_KEY, fake_tokens_per_s=200.0)
        await self.workers.start("w1", fleet_key=FLEET_KEY, served_model_name=EVIL)

    async def serve(self, **options: Any) -> Served:
        served = await serve(self.nats_url, self.subjects, **options)
        self.served.append(served)
        await until(lambda: len(list(served.client.members.view.ready())) == len(self.workers.workers))
        return served

    async def stop(self) -> None:
        for served in self.served:
            await served.stop()
        await self.workers.stop()
        assert self.placement is not None
        await self.placement[0].stop(grace_s=0)
        await self.placement[1].close()
