"""An ingress as a process of the simulated fleet: the wiring of its own `main`, without sockets, signals and probes."""

from __future__ import annotations

import asyncio
import json

from prometheus_client import CollectorRegistry

from kvfleet.ingress.app import create_app
from kvfleet.ingress.auth.access import Access
from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.ingress import Ingress, IngressBuckets
from kvfleet.ingress.settings import IngressSettings, config_of
from kvproto.buckets import Bucket
from kvproto.client import Client
from kvproto.members import Lease
from kvproto.messages import Role
from kvproto.subjects import INGRESS_INBOX, sealed_prefix
from kvservice.membership import member_record
from tests.chaos.fleet import key_of
from tests.chaos.layout import TENANTS
from tests.dst.web import SimWeb
from tests.dst.world import FLEET_KEY, World

_KEYS = [{"name": one, "sha256": hash_key(key_of(one)), "tenant": one, "admin": True} for one in TENANTS]
PORT = 8080


async def ingress(world: World, web: SimWeb, name: str) -> Ingress:
    """Begins it in its process, where it listens as host `name`. Its callers are the tenants of the chaos suite."""
    process, home = world.processes[name], world.home_of(name)
    subjects = home.subjects
    loop = process.loop
    settings = IngressSettings(
        id=name,
        nats_url=home.url,
        region=subjects.region,
        namespace=subjects.namespace,
        fleet_key=FLEET_KEY.decode(),
        api_keys=json.dumps({"keys": _KEYS}),
    )
    access = Access(settings, loop.time)
    prefix = sealed_prefix(INGRESS_INBOX, name, FLEET_KEY)
    connection = await world.connect(home, f"ingress-{name}", prefix, "ingress")
    bucket = await Bucket.open(connection, subjects.members_bucket)
    client = await Client.over(connection, subjects)
    buckets = await IngressBuckets.open(connection, subjects)
    config, registry = config_of(settings, name), CollectorRegistry()
    made = Ingress(client, config, buckets, access.tenancy, registry, access.audit, access.readings())
    await made.start()
    lease = Lease(bucket, member_record(Role.INGRESS, name, address=f"{name}:{PORT}"))
    await lease.take()
    process.tasks.append(asyncio.create_task(lease.run(lambda error: world.fatal(str(error))), name="lease"))
    web.serve(process.place, loop, name, create_app(made))
    return made
