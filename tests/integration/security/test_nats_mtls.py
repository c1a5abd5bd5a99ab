"""NATS under deploy/nats/production.conf: both sides show a certificate of the fleet's CA, and users an nkey.

Everything here is real: nats-server, certificates of `kvfleet secrets`, and the connection as services make it.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvproto.buckets import ensure_buckets
from kvproto.connection import Connection
from kvproto.errors import AuthenticationFailed, KvfleetError, Unavailable
from kvproto.subjects import Subjects, inbox_prefix
from kvproto.testing.nats_process import NatsProcess, find_nats_server
from kvservice.membership import tls_context
from kvservice.settings import ServiceSettings
from tests.support.secrets_rig import DEPLOY, Secrets, production, tls_url
from tests.support.waiting import LIMIT_S

StartNats = Callable[..., NatsProcess]
S = Subjects()
SOON_S = 1.0  # a refusal is to come sooner than a test's patience ends, with a reason in it


async def come(url: str, user: str = "admin", *, inbox: str = "_adm", seed: str | None, **tls: str) -> Connection:
    """As a service does, but with less patience."""
    return await Connection.open(
        url,
        name=f"{user}-t",
        inbox_prefix=inbox_prefix(inbox, "t"),
        nkey_seed=seed,
        tls=tls_context(ServiceSettings(**tls)),
        connect_timeout_s=SOON_S,
    )


async def refused(url: str, *, seed: str | None, kind: type[KvfleetError] = Unavailable, **tls: Any) -> str:
    """What it says, within bounded time."""
    began = time.monotonic()
    with pytest.raises(kind) as error:
        await come(url, seed=seed, **tls)
    assert time.monotonic() - began < SOON_S + 2
    return str(error.value)


async def works(connection: Connection) -> None:
    got = asyncio.Event()

    async def receive(message: Any) -> None:
        got.set()

    await connection.subscribe(f"{connection.inbox_prefix}.works", receive)
    await connection.synced()
    await connection.publish(f"{connection.inbox_prefix}.works", b"")
    await asyncio.wait_for(got.wait(), LIMIT_S)


async def test_the_right_certificate_and_nkey_come_in(nats: NatsProcess, own: Secrets) -> None:
    connection = await come(tls_url(nats), seed=own.seed("admin"), **own.nats_tls())
    assert await ensure_buckets(connection, S) == []
    await works(connection)
    writer = connection.raw._transport._io_writer  # type: ignore[union-attr]
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    await connection.close()
    by_name = await come(tls_url(nats).replace("127.0.0.1", "localhost"), seed=own.seed("admin"), **own.nats_tls())
    await by_name.close()


async def test_a_producer_comes_in_with_its_own_certificate(nats: NatsProcess, own: Secrets) -> None:
    tls = own.nats_tls("producer-acme")
    producer = await come(tls_url(nats), "producer", inbox="_prd.acme", seed=own.seed("producer-acme"), **tls)
    await producer.subscribe("_prd.acme.t.x", _ignore)
    await producer.publish(S.place("acme", "m"), b"")
    await producer.synced()
    assert producer.errors_total == 0
    await producer.subscribe(S.place_all(), _ignore)
    await producer.synced()
    assert producer.errors_total == 1, "it is that producer and nobody else"
    await producer.close()


# ---------------------------------------------------------------------- the server refuses


async def test_the_server_refuses_who_shows_no_certificate(nats: NatsProcess, own: Secrets) -> None:
    said = await refused(tls_url(nats), seed=own.seed("admin"), nats_ca=own["ca.crt"])
    assert "certificate required" in said, said


async def test_the_server_refuses_a_foreign_certificate(nats: NatsProcess, own: Secrets, foreign: Secrets) -> None:
    shown = {**foreign.nats_tls(), "nats_ca": own["ca.crt"]}
    said = await refused(tls_url(nats), seed=own.seed("admin"), **shown)
    assert "TLS" in said, said
    assert "certificate signed by unknown authority" in nats.log() or "failed to verify" in nats.log()


async def test_the_server_refuses_an_expired_certificate(nats: NatsProcess, own: Secrets, expired: Secrets) -> None:
    said = await refused(tls_url(nats), seed=own.seed("admin"), **expired.nats_tls())
    assert "certificate" in said, said
    assert "expired" in nats.log()


async def test_a_certificate_is_no_login(nats: NatsProcess, own: Secrets, foreign: Secrets) -> None:
    """No nkey, somebody else's nkey, a development password: the fleet's certificate helps none of them."""
    assert "anonymous" in await refused(tls_url(nats), seed=None, kind=AuthenticationFailed, **own.nats_tls())
    stranger = foreign.seed("admin")
    said = await refused(tls_url(nats), seed=stranger, kind=AuthenticationFailed, **own.nats_tls())
    assert "refuses the nkey" in said
    assert stranger not in said + nats.log()
    with pytest.raises(AuthenticationFailed):
        await Connection.open(
            tls_url(nats), name="x", inbox_prefix="_adm.x", user="admin", password="admin",
            tls=tls_context(ServiceSettings(**own.nats_tls())), connect_timeout_s=SOON_S,
        )  # fmt: skip


async def test_a_client_without_tls_is_told_so_in_bounded_time(nats: NatsProcess, own: Secrets) -> None:
    said = await refused(nats.url, seed=own.seed("admin"))
    assert "TLS: " in said, said


def test_what_is_no_tls_is_cut_off(nats: NatsProcess) -> None:
    """Beyond its greeting a server of production.conf has no word for whoever goes on without TLS."""
    where = ("127.0.0.1", int(nats.url.rsplit(":", 1)[1]))
    with socket.create_connection(where, LIMIT_S) as plain:
        plain.settimeout(LIMIT_S)
        assert plain.recv(4096).startswith(b"INFO ")
        plain.sendall(b'CONNECT {"user":"admin","pass":"admin"}\r\nPING\r\n')
        rest = b""
        while piece := plain.recv(4096):
            rest += piece
        assert b"PONG" not in rest


# ---------------------------------------------------------------------- the client refuses


async def test_the_client_refuses_a_server_of_a_foreign_ca(
    start_nats: StartNats, own: Secrets, foreign: Secrets
) -> None:
    imposter = start_nats(foreign)
    said = await refused(tls_url(imposter), seed=own.seed("admin"), **own.nats_tls())
    assert "CERTIFICATE_VERIFY_FAILED" in said, said


async def test_the_client_refuses_another_host_name(nats: NatsProcess, own: Secrets) -> None:
    said = await refused(tls_url(nats).replace("127.0.0.1", "127.0.0.2"), seed=own.seed("admin"), **own.nats_tls())
    assert "not valid for '127.0.0.2'" in said or "no NATS server answers" in said
    if nats_listens_everywhere(nats):
        assert "mismatch" in said


def nats_listens_everywhere(server: NatsProcess) -> bool:
    return "0.0.0.0" in server.log()


async def test_a_fleets_process_cannot_pose_as_nats(start_nats: StartNats, own: Secrets) -> None:
    """Its certificate is of the right CA and good for serving, the data plane needs that, but it names no host."""
    imposter = start_nats(own, server="node")
    said = await refused(tls_url(imposter), seed=own.seed("admin"), **own.nats_tls())
    assert "CERTIFICATE_VERIFY_FAILED" in said, said


async def test_a_client_with_a_ca_says_nothing_to_a_server_without_tls(
    nats_url: str, own: Secrets, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sits between them could leave `tls_required` out of the greeting: that is no way to hear its nkey."""
    said = await refused(nats_url.replace("nats://", "tls://"), seed=own.seed("admin"), **own.nats_tls())
    assert "the server speaks no TLS" in said


# ---------------------------------------------------------------------- what happens while it runs


async def test_it_reconnects_under_tls_with_certificates_as_they_are_then(
    start_nats: StartNats, own: Secrets, foreign: Secrets, tmp_path: Path
) -> None:
    """The server restarts; both sides' certificates were renewed meanwhile; a bad file changes nothing."""
    shown = Secrets(shutil.copytree(own.folder, tmp_path / "shown"))
    server = start_nats(own)
    connection = await come(tls_url(server), seed=own.seed("admin"), **shown.nats_tls())
    await works(connection)

    async def restarted(count: int) -> None:
        server.restart()
        async with asyncio.timeout(LIMIT_S):
            while connection.reconnects_total < count or not connection.is_connected:
                await asyncio.sleep(0.02)
        await works(connection)

    await restarted(1)
    serial = serial_of(shown.folder / "node.crt")
    (shown.folder / "node.crt").unlink()
    Secrets.make(shown.folder)
    assert serial_of(shown.folder / "node.crt") != serial
    await restarted(2)
    assert shown_serial(connection) == serial_of(shown.folder / "node.crt")
    (shown.folder / "node.crt").write_bytes(Path(foreign["node.crt"]).read_bytes())  # not that of its key
    await restarted(3)
    await connection.close()


def serial_of(path: Path) -> int:
    from cryptography import x509

    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def shown_serial(connection: Connection) -> int:
    """Of the certificate that this end showed last: that of the context it used."""
    context = connection.raw.options["tls"].current()
    assert isinstance(context, ssl.SSLContext)
    (path,) = [
        file for file in connection.raw.options["tls"]._files if str(file).endswith(".crt") and "ca" not in file.name
    ]
    return serial_of(path)


async def test_the_server_takes_renewed_certificates_on_reload(own: Secrets, tmp_path: Path) -> None:
    """SIGHUP: without a restart, and connections stay. Started as in production, by name of its configuration alone."""
    renewed = Secrets(shutil.copytree(own.folder, tmp_path / "renewed"))
    config = production(tmp_path / "nats", renewed)
    with running(config, own.nats_env, tmp_path / "run") as (url, process):
        connection = await come(url, seed=own.seed("admin"), **own.nats_tls())
        before = served_certificate(url, own)
        (renewed.folder / "nats.crt").unlink()
        Secrets.make(renewed.folder)
        shutil.copy(renewed["nats.crt"], tmp_path / "nats" / "tls" / "tls.crt")
        process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(LIMIT_S):
            while served_certificate(url, own) == before:
                await asyncio.sleep(0.05)
        await works(connection)
        assert connection.reconnects_total == 0
        await connection.close()


@contextmanager
def running(
    config: Path, environment: dict[str, str], folder: Path, *flags: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server without a `-n` flag, with which it would not reload; its URL."""
    folder.mkdir()
    command = [str(find_nats_server()), "-c", str(config), "-a", "127.0.0.1", "-p", "-1", "-sd", str(folder / "js")]
    command += ["--ports_file_dir", str(folder), "-l", str(folder / "nats.log"), *flags]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + LIMIT_S
        while not (ports := list(folder.glob("*.ports"))) or not ports[0].read_text():
            assert process.poll() is None, (folder / "nats.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        yield json.loads(ports[0].read_text())["nats"][0].replace("nats://", "tls://"), process
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def served_certificate(url: str, secrets: Secrets) -> bytes:
    context = tls_context(ServiceSettings(**secrets.nats_tls()))
    assert context is not None
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), LIMIT_S) as plain:
        plain.recv(4096)
        with context.wrap_socket(plain, server_hostname="localhost") as under_tls:
            shown = under_tls.getpeercert(binary_form=True)
    assert shown
    return shown


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize("name", ["production.conf", "production-cluster.conf"])
def test_the_configuration_is_valid_and_names_what_is_missing(name: str, own: Secrets, tmp_path: Path) -> None:
    config = production(tmp_path / "nats", own).parent / name
    environment = own.nats_env | {"KVF_CLUSTER_ROUTES": '["tls://a:6222", "tls://b:6222"]', "KVF_SERVER_NAME": "a"}

    def check(given: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [str(find_nats_server()), "-t", "-c", str(config)]
        return subprocess.run(command, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert check(environment).returncode == 0, check(environment).stderr
    used = set(re.findall(r"\$(KVF_\w+)", (DEPLOY / "accounts-nkeys.conf").read_text()))
    for missing in sorted(used)[:2]:
        found = check({key: value for key, value in environment.items() if key != missing})
        assert found.returncode != 0
        assert missing in found.stderr


def test_what_the_configuration_opens() -> None:
    """All addresses for clients, none for monitoring; TLS with verification for clients and routes; no passwords."""
    main = (DEPLOY / "production.conf").read_text()
    cluster = (DEPLOY / "production-cluster.conf").read_text()
    assert re.search(r'^host: "0\.0\.0\.0"', main, re.MULTILINE)
    assert re.search(r'^http: "127\.0\.0\.1:8222"', main, re.MULTILINE)
    for text in (main, cluster):
        (block,) = re.findall(r"^ *tls \{.*?\}", text, re.DOTALL | re.MULTILINE)
        assert re.search(r"verify: true\b", block)
    assert "pinned_certs" in cluster
    said = re.sub(r"#.*", "", main + cluster + (DEPLOY / "accounts-nkeys.conf").read_text())
    assert not re.search("password|user:|no_auth_user|allow_non_tls", said)
    limits = re.findall(r"^(max_payload|ping_interval|ping_max): (\S+)", main, re.MULTILINE)
    assert limits == re.findall(
        r"^(max_payload|ping_interval|ping_max): (\S+)", (DEPLOY / "nats-server.conf").read_text(), re.MULTILINE
    )


async def _ignore(message: Any) -> None:
    pass
