"""A server of the data plane and connections to it, by Unix socket, TCP and TCP under TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer, ServingLimits
from tests.integration.dataplane.stores import IDENTITY, SECRET, MemoryStore
from tests.support.waiting import LIMIT_S, wait_until


@dataclass
class Plane:
    """One server of one store. `connect` makes clients, closed with the test."""

    store: MemoryStore
    ring: KeyRing
    server: DataPlaneServer
    client_tls: ssl.SSLContext | None
    clients: list[DataPlaneClient] = field(default_factory=list)

    def connect(self, address: str = "", ring: KeyRing | None = None, **changes: Any) -> DataPlaneClient:
        options: dict[str, Any] = {"identity": "w1", "expect": IDENTITY, "same_host": True, "tls": self.client_tls}
        addresses = (address,) if address else self.server.addresses
        client = DataPlaneClient.connect(addresses, ring or self.ring, **options | changes)
        self.clients.append(client)
        return client

    @property
    def address(self) -> str:
        return self.server.addresses[0]

    def settle(self) -> None:
        """Wait until nothing is lent or reserved any more."""
        wait_until(lambda: self.store.lent == 0 and self.store.reserved == 0)


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, and what it signed for 127.0.0.1 and for a client."""

    folder: Path

    def server(self, *, asks_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "server.pem", self.folder / "server.key")
        if asks_client:
            context.load_verify_locations(self.folder / "ca.pem")
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, *, shows: bool = False, trusts: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / "ca.pem" if trusts else None)
        if shows:
            context.load_cert_chain(self.folder / "client.pem", self.folder / "client.key")
        return context


def soon(seconds: float = LIMIT_S) -> float:
    """A deadline that a working transfer does not miss."""
    return time.monotonic() + seconds


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-extfile", f"{name}.ext", "-out", f"{name}.pem", "-days", "2"),
        )
    return Certificates(folder)


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Short: a Unix socket's path has at most 107 bytes."""
    folder = tempfile.mkdtemp(prefix="dp-")
    yield Path(folder) / "s.sock"
    shutil.rmtree(folder)


@pytest.fixture
def start(socket_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Plane]]:
    """`start(link, limits)`: a server on `unix`, `tcp` or `tls`. All ends with the test, and then nothing is left."""
    before = set(threading.enumerate())
    planes: list[Plane] = []

    def start_one(link: str = "unix", limits: ServingLimits | None = None) -> Plane:
        tls = request.getfixturevalue("certificates") if link == "tls" else None
        store, ring = MemoryStore(), KeyRing({"k": SECRET})
        server = DataPlaneServer(
            store,
            ring,
            IDENTITY,
            tcp=("127.0.0.1", 0) if link != "unix" else None,
            unix_path=socket_path if link == "unix" else None,
            tls=tls.server() if tls else None,
            limits=limits or ServingLimits(),
        )
        server.start()
        planes.append(Plane(store, ring, server, tls.client() if tls else None))
        return planes[-1]

    yield start_one
    for plane in planes:
        for client in plane.clients:
            client.close()
        plane.server.close()
        plane.settle()
    wait_until(lambda: not set(threading.enumerate()) - before)


@pytest.fixture(params=["unix", "tcp", "tls"])
def plane(request: pytest.FixtureRequest, start: Callable[..., Plane]) -> Plane:
    return start(request.param)
