"""A real ingress process that serves HTTPS itself, and probes beside it, as behind a balancer of TCP connections."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from scripted_worker import ScriptedWorker

from kvproto.subjects import Subjects
from kvproto.testing.nats_process import free_port
from kvservice import launch
from tests.support.waiting import LIMIT_S


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ingress")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *launch.command("kvfleet.ingress.main", *flags),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=os.environ,
    )  # fmt: skip


@asynccontextmanager
async def https_ingress(nats_url: str, namespace: str, folder: Path) -> AsyncIterator[tuple[str, Path]]:
    certificate, key = write_certificate(folder)
    port = free_port()
    process = await start(
        f"--nats-url={nats_url}", f"--namespace={namespace}", f"--port={port}",
        f"--tls-cert={certificate}", f"--tls-key={key}", "--keep-alive-s=1", "--drain-s=0",
    )  # fmt: skip
    try:
        yield f"https://127.0.0.1:{port}", certificate
    finally:
        process.kill()
        await process.communicate()


async def test_streams_over_tls_and_nothing_else(
    nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.reply = [(50 + n, f" word{n}") for n in range(5)]
    async with https_ingress(nats_url, fleet_buckets.namespace, tmp_path) as (url, certificate):
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=LIMIT_S, trust_env=False) as http:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        if (await http.get("/readyz")).is_success:
                            break
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
            answer = await http.post("/generate", json={"prompt": "x", "max_tokens": 5})
        assert answer.status_code == 200
        assert answer.text.count('"type":"token"') == 5
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as stranger:
            for bad in (url, url.replace("https", "http")):  # who does not trust the certificate; who speaks plainly
                try:
                    await stranger.get(f"{bad}/readyz")
                except httpx.TransportError:
                    continue
                raise AssertionError(bad)
        await _idle_connections_end_after_the_time_that_was_set(url, trusting)


async def _idle_connections_end_after_the_time_that_was_set(url: str, trusting: ssl.SSLContext) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=trusting)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    began = time.monotonic()
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200"), "read() returns at the end of it"
    assert 0.9 < time.monotonic() - began < 15
    writer.close()
