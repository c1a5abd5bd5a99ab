"""deploy/nats/region-*.conf: regions are joined by TLS and an nkey, by nothing less, and little passes between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfleet.cli.operator.init import create_buckets
from kvproto.connection import Connection
from kvproto.errors import AuthenticationFailed
from kvproto.subjects import Subjects
from kvproto.testing.nats_process import free_ports
from tests.integration.nats.test_roles import TABLE, is_exact
from tests.integration.regions.conftest import Link, Region, TwoRegions
from tests.integration.regions.test_regions import ask, hears_of
from tests.integration.security.region_rig import Ear, RegionServer, joined
from tests.support.fake_fleet import FakeFleet
from tests.support.secrets_rig import DEPLOY, Secrets

REFUSED_S = 8.0

# Beside the table's: an ingress's frames and answers; what it reads of its buckets stays.
INBOXES = {"_ing.i1.r.5": True, "_ing.i1.answers.7": True, "_ing.i1.x": False, "_ing.i1.a.b.c": False}
SAID = {subject: False for subject in TABLE if is_exact(subject)} | INBOXES
END = "kvf.region.test.end"

Pair = tuple[RegionServer, RegionServer]
MakePair = Callable[..., Pair]


@pytest.fixture(scope="session")
def us(own: Secrets) -> Secrets:
    return own


@pytest.fixture(scope="session")
def eu(foreign: Secrets) -> Secrets:
    """The other fleet of this folder is a region: the same names, another CA, other nkeys."""
    return foreign


def pair_of(folder: Path, us: Secrets, eu: Secrets) -> Pair:
    ports = free_ports(1)
    hub, leaf = (
        RegionServer(name, secrets, folder / name, kind, ports, us.seed("region-link"), (us, eu))
        for name, secrets, kind in (("us", us, "hub"), ("eu", eu, "leaf"))
    )
    return hub, leaf


@contextlib.contextmanager
def started(*servers: RegionServer) -> Iterator[None]:
    try:
        for one in servers:
            one.process.start()
        yield
    finally:
        for one in reversed(servers):
            one.process.stop()


@pytest.fixture
def pair(tmp_path: Path, us: Secrets, eu: Secrets) -> Pair:
    """Not started."""
    return pair_of(tmp_path, us, eu)


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory, us: Secrets, eu: Secrets) -> Iterator[Pair]:
    pair = pair_of(tmp_path_factory.mktemp("regions"), us, eu)
    with started(*pair):
        assert asyncio.run(joined(*pair)), pair[0].process.log() + pair[1].process.log()
        yield pair


# ---------------------------------------------------------------------- what passes


async def crossing(speaker: RegionServer, listener: RegionServer) -> set[str]:
    """What arrives of all that there is to say, said by who may say anything, to who may hear anything."""
    said, heard = await speaker.admin(), await listener.admin()
    try:
        ear = Ear(heard)
        await ear.open([*SAID, END])
        assert await ear.hears(said, END, b"begin")
        for subject in SAID:
            await said.publish(subject, b"crossing")
        assert await ear.hears(said, END, b"end")
        return {subject for subject in SAID if b"crossing" in ear.heard.get(subject, ())}
    finally:
        await said.close()
        await heard.close()


@pytest.mark.parametrize("direction", ["hub to leaf", "leaf to hub"])
async def test_nothing_crosses_but_what_is_listed(regions: Pair, direction: str) -> None:
    speaker, listener = regions if direction == "hub to leaf" else regions[::-1]
    expected = {subject for subject in SAID if subject.startswith(("kvf.region.", "_prd."))}
    expected |= {"_ing.i1.b", *(subject for subject, crosses in INBOXES.items() if crosses)}
    assert await crossing(speaker, listener) == expected


@pytest.mark.parametrize("direction", ["hub to leaf", "leaf to hub"])
async def test_a_leaf_keeps_its_inside_from_a_hub_that_allows_everything(pair: Pair, direction: str) -> None:
    """The hub's servers were taken over: the leaf's own still deny."""
    hub, leaf = pair
    everything = '[ ">" ]\n#'
    hub.change("roles/region-link.conf", "publish: ", f"publish: {everything}")
    hub.change("roles/region-link.conf", "subscribe: ", f"subscribe: {everything}")
    with started(hub, leaf):
        speaker, listener = pair if direction == "hub to leaf" else pair[::-1]
        arrived = await crossing(speaker, listener)
    assert "something.else" in arrived, "the hub does allow everything"
    inside = ("kvf.", "$", "_plc.", "_wrk.", "_vlt.", "_adm.")
    assert {one for one in arrived if one.startswith(inside) and not one.startswith("kvf.region.")} == set()


def test_the_files_open_no_more_than_they_say() -> None:
    """TLS 1.3 before the first word at both ends, verified; no passwords; the limits of production.conf."""
    hub, leaf, both, main = (
        re.sub(r"#.*", "", (DEPLOY / f"{name}.conf").read_text())
        for name in ("region-hub", "region-leaf", "region", "production")
    )
    for text in (hub, leaf):
        (block,) = re.findall(r"tls \{.*?\}", text, re.DOTALL)
        for line in ('min_version: "1.3"', "handshake_first: true", 'ca_file: "/etc/nats/tls/region-ca.crt"'):
            assert line in block
    assert re.search(r"verify: true\b", hub)
    assert not re.search("password|user:|authorization|insecure", hub + leaf + both)
    limits = r"(max_\w+_store): (\w+)"
    assert re.findall(limits, both) == re.findall(limits, main)


def test_regions_have_streams_of_their_own(regions: Pair) -> None:
    for one in regions:
        assert f"Domain:          {one.name}\n" in one.process.log()


async def test_the_links_user_is_no_clients(regions: Pair) -> None:
    """Its seed lies in other regions: there it opens the leaf port, and not the one of clients."""
    hub, _ = regions
    with pytest.raises(AuthenticationFailed):
        await Connection.open(
            hub.url, name="x", inbox_prefix="_ing.x", connect_timeout_s=1.0, **hub.login("region-link")
        )


# ---------------------------------------------------------------------- who is refused


async def is_refused(pair: Pair, by: RegionServer, saying: str) -> None:
    """No word crosses, and the one who refuses says why."""
    with started(*pair):
        end = asyncio.get_running_loop().time() + REFUSED_S
        while saying not in by.process.log():
            assert asyncio.get_running_loop().time() < end, [one.process.log() for one in pair]
            await asyncio.sleep(0.05)
        assert not await joined(*pair, seconds=1.0)


async def test_a_hub_refuses_a_leaf_without_tls(pair: Pair) -> None:
    hub, leaf = pair
    text = (leaf.config / "region-leaf.conf").read_text()
    block = text[text.index("      tls {") : text.index("    }\n  ]")]
    leaf.change("region-leaf.conf", block, "")
    leaf.process._spec.environment["KVF_LEAF_URLS"] = json.dumps([f"nats-leaf://localhost:{hub.ports[0]}"])  # type: ignore[index]
    await is_refused(pair, hub, "TLS leafnode handshake error")


async def test_a_leaf_refuses_a_hub_without_tls(pair: Pair) -> None:
    hub, leaf = pair
    text = (hub.config / "region-hub.conf").read_text()
    hub.change("region-hub.conf", text[text.index("  tls {") : text.rindex("}")], "")
    await is_refused(pair, leaf, "TLS Handshake Failure")


async def test_a_hub_refuses_a_leaf_of_a_foreign_authority(pair: Pair, us: Secrets) -> None:
    hub, _ = pair
    (hub.config / "tls/region-ca.crt").write_text(us.text("ca.crt"))
    await is_refused(pair, hub, "certificate signed by unknown authority")


async def test_a_leaf_refuses_a_hub_of_a_foreign_authority(pair: Pair, eu: Secrets) -> None:
    _, leaf = pair
    (leaf.config / "tls/region-ca.crt").write_text(eu.text("ca.crt"))
    await is_refused(pair, leaf, "certificate signed by unknown authority")


async def test_a_leaf_refuses_a_hub_whose_certificate_names_no_host(pair: Pair, us: Secrets) -> None:
    """A worker of the hub's region is none of its servers."""
    hub, leaf = pair
    for kind in ("crt", "key"):
        (hub.config / f"tls/node.{kind}").write_text(us.text(f"node.{kind}"))
        hub.change("region-hub.conf", f"tls/tls.{kind}", f"tls/node.{kind}")
    await is_refused(pair, leaf, "certificate is valid for")


@pytest.mark.parametrize("nkey", ["none", "the leaf's own"])
async def test_a_hub_refuses_a_leaf_without_its_nkey(pair: Pair, nkey: str, eu: Secrets) -> None:
    hub, leaf = pair
    (leaf.config / "region-link.nkey").write_text("" if nkey == "none" else f"nkey: {eu.seed('region-link')}\n")
    await is_refused(pair, hub, "authentication error")


# ---------------------------------------------------------------------- at work


async def test_a_request_spills_over_it(regions: Pair) -> None:
    """A producer of us, where no worker is, is served by a worker of eu; all come in as their role."""
    made: list[Region] = []
    try:
        for one in regions:
            await create_buckets(one.operator(), "kvf")
            subjects = Subjects("kvf", one.name)
            roles = {"placement": "placement", "producer": "producer-public"}
            logins = {role: one.login(user) for role, user in roles.items()}
            made.append(Region(one.url, subjects, FakeFleet(one.url, subjects, login=one.login("worker")), logins))
            await made[-1].start_placement(f"p-{one.name}")
        us, eu = made
        await eu.worker("w7")
        client = await us.client()
        await hears_of(TwoRegions(us, eu, Link(0)))
        worker, ids = await ask(client)
        assert (worker, len(ids)) == ("eu.w7", 40)
        assert client.counters.spilled_total == 1
        everybody = [client.connection, *(connection for one in made for _, connection in one.placements)]
        assert [connection.errors_total for connection in everybody] == [0, 0, 0]
    finally:
        for one in made:
            await one.stop()


async def test_a_cluster_is_joined_at_any_of_its_servers(tmp_path: Path, us: Secrets, eu: Secrets) -> None:
    """Three servers of production-cluster.conf with region-hub.conf, one leaf that is told of all of them: a word from
    the region that comes in anywhere is heard everywhere, and after the server that carried it is gone."""
    clients, routes = free_ports(3), free_ports(3)
    hubs = [
        RegionServer(
            "us", us, tmp_path / f"us-{at}", "hub", [clients[at]], "", (us, eu), "production-cluster.conf",
            {
                "KVF_SERVER_NAME": f"us-{at}",
                "KVF_CLUSTER_ROUTES": json.dumps([f"tls://localhost:{port}" for port in routes]),
            },
        )
        for at in range(3)
    ]  # fmt: skip
    for one, port in zip(hubs, routes, strict=True):
        one.change("production-cluster.conf", "0.0.0.0:6222", f"127.0.0.1:{port}")
    leaf = RegionServer("eu", eu, tmp_path / "eu", "leaf", clients, us.seed("region-link"), (us, eu))
    with started(*hubs, leaf):
        for one in hubs:
            assert await joined(one, leaf), leaf.process.log()
        await create_buckets(hubs[0].operator(), "kvf", replicas=3)
        (carrier,) = [one for one in hubs if "Leafnode connection created" in one.process.log()]
        carrier.process.kill()
        for one in hubs:
            if one is not carrier:
                assert await joined(one, leaf), leaf.process.log()
