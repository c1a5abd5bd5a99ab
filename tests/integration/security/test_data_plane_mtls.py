"""The data plane under TLS, with the contexts that workers and vaults make of their settings: each side refuses the
other without a certificate of the fleet's CA that is in date, in bounded time, and renewed ones need no restart.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import DataPlaneError, HandshakeRefused
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer, ServingLimits
from kvservice.data_plane import DataPlaneSettings, client_context, server_context
from tests.integration.dataplane.stores import IDENTITY, ROOT, SECRET, MemoryStore, made_many
from tests.integration.worker_tiers.rig import FORMAT, HOST, KEYS, SHAPE, DictStore, Fetched, names_of, ready
from tests.support.secrets_rig import Secrets
from tests.support.waiting import LIMIT_S, wait_until

Serve = Callable[..., DataPlaneServer]
RING = KeyRing({"k": SECRET})
SOON_S = 2.0


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[DataPlaneServer] = []

    def start(settings: dict[str, Any] | None) -> DataPlaneServer:
        tls = None if settings is None else server_context(DataPlaneSettings(**settings))
        limits = ServingLimits(handshake_s=1.0)
        servers.append(DataPlaneServer(MemoryStore(), RING, IDENTITY, tcp=("127.0.0.1", 0), tls=tls, limits=limits))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def connect(server: DataPlaneServer, tls: ssl.SSLContext | None) -> DataPlaneClient:
    return DataPlaneClient.connect(
        server.addresses, RING, identity="w1", expect=IDENTITY, same_host=False, tls=tls, timeout_s=SOON_S
    )


def moves_blocks(server: DataPlaneServer, tls: ssl.SSLContext | None) -> None:
    client = connect(server, tls)
    blocks = made_many(3)
    try:
        deadline = time.monotonic() + LIMIT_S
        client.put(ROOT, blocks, deadline)
        assert client.has(ROOT, [header.hash for header, _ in blocks], False, deadline) == [True] * 3
    finally:
        client.close()


def refused(server: DataPlaneServer, tls: ssl.SSLContext | None) -> DataPlaneError:
    began = time.monotonic()
    with pytest.raises(DataPlaneError) as error:
        connect(server, tls)
    assert time.monotonic() - began < SOON_S + 1
    assert server.counters.connections == 0, "it was heard by nobody"
    return error.value


def client_tls(**settings: Any) -> ssl.SSLContext | None:
    return client_context(DataPlaneSettings(**settings))


def test_the_right_certificates_work(serve: Serve, own: Secrets) -> None:
    moves_blocks(serve(own.data_plane_tls()), client_tls(**own.data_plane_tls()))


@pytest.mark.parametrize("shown", ["none", "foreign", "expired"])
def test_the_server_refuses_a_client(
    serve: Serve, own: Secrets, foreign: Secrets, expired: Secrets, shown: str
) -> None:
    """TLS 1.3: a client learns it at its first word."""
    server = serve(own.data_plane_tls())
    settings: dict[str, Any] = {"data_plane_ca": own.folder / "ca.crt"}
    if shown != "none":
        of = foreign if shown == "foreign" else expired
        settings = of.data_plane_tls() | settings
    refused(server, client_tls(**settings))
    wait_until(lambda: server.counters.refused == {"tls": 1})
    moves_blocks(server, client_tls(**own.data_plane_tls()))


@pytest.mark.parametrize("served", ["foreign", "expired", "producer's"])
def test_the_client_refuses_a_server(
    serve: Serve, own: Secrets, foreign: Secrets, expired: Secrets, served: str
) -> None:
    """A producer's certificate is of the right CA and no server's: who has one cannot pose as a vault."""
    settings = {
        "foreign": foreign.data_plane_tls(),
        "expired": expired.data_plane_tls(),
        "producer's": own.data_plane_tls("producer-acme"),
    }[served]
    settings["data_plane_ca"] = own.folder / "ca.crt"
    error = refused(serve(settings), client_tls(**own.data_plane_tls()))
    assert isinstance(error, HandshakeRefused)
    assert error.reason == "tls"
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)


def test_without_tls_nobody_speaks_to_who_has_it(serve: Serve, own: Secrets) -> None:
    refused(serve(own.data_plane_tls()), None)
    refused(serve(None), client_tls(**own.data_plane_tls()))


def test_renewed_certificates_are_taken_up_without_a_restart(serve: Serve, own: Secrets, tmp_path: Path) -> None:
    """Server and client follow their files; what is half copied changes nothing."""
    mine = Secrets(shutil.copytree(own.folder, tmp_path / "mine"))
    server, tls = serve(mine.data_plane_tls()), client_tls(**mine.data_plane_tls())
    moves_blocks(server, tls)
    whole = (mine.folder / "node.crt").read_bytes()
    (mine.folder / "node.crt").write_bytes(whole[:100])
    moves_blocks(server, tls)
    (mine.folder / "node.crt").unlink()
    moves_blocks(server, tls)
    Secrets.make(mine.folder)
    assert (mine.folder / "node.crt").read_bytes() != whole
    moves_blocks(server, tls)
    assert served(server, own) == ssl.PEM_cert_to_DER_cert((mine.folder / "node.crt").read_text())


def served(server: DataPlaneServer, secrets: Secrets) -> bytes:
    context = client_tls(**secrets.data_plane_tls())
    assert context is not None
    host, port = server.addresses[0].removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as under_tls:
        shown = under_tls.getpeercert(binary_form=True)
    assert shown
    return shown


def test_a_workers_blocks_come_back_from_a_vault_to_the_bit(serve: Serve, own: Secrets) -> None:
    """By the worker's own way to vaults, and the certificates that both have in production."""
    store, names = DictStore(), names_of(70)
    store.add(names)
    tls = server_context(DataPlaneSettings(**own.data_plane_tls()))
    server = DataPlaneServer(store, KEYS, "v1", tcp=("127.0.0.1", 0), tls=tls)
    server.start()
    settings = RemoteSettings("me", HOST, FORMAT, SHAPE, BlockCodec.RAW, 64 << 20, 1.0)
    remote = RemoteTiers(settings, KEYS, tls=client_tls(**own.data_plane_tls()))
    try:
        remote.set_vaults([SourceAddress("v1", "e1", "another host", server.addresses)])
        ready(remote)
        fetched = Fetched(remote, names).wait()
        assert fetched.check() == 70
        assert sum(count for what, count in store.asked if what == "get") == 70
    finally:
        remote.close()
        server.close()


def test_another_ca_too(serve: Serve, own: Secrets, foreign: Secrets, tmp_path: Path) -> None:
    """The whole folder is replaced: from then on the new CA's count, and the former one's do not."""
    mine = Secrets(shutil.copytree(own.folder, tmp_path / "mine"))
    server, tls = serve(mine.data_plane_tls()), client_tls(**mine.data_plane_tls())
    moves_blocks(server, tls)
    for name in ("ca.crt", "node.crt", "node.key"):
        shutil.copy(foreign[name], mine[name])
    moves_blocks(server, tls)
    with pytest.raises(DataPlaneError):
        connect(server, client_tls(**own.data_plane_tls()))
