"""An ingress as a process of its own, as it is deployed: settings from the environment, signals, files."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvproto.subjects import Subjects
from kvservice import launch
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]


class IngressProcess:
    """`log` is all that it has written to stdout and stderr."""

    def __init__(self, url: str, subjects: Subjects, folder: Path, **settings: object) -> None:
        said = {f"KVFLEET_{name.upper()}": str(value) for name, value in settings.items()}
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVFLEET_")}
        env |= {"KVFLEET_NATS_URL": url, "KVFLEET_NAMESPACE": subjects.namespace, "KVFLEET_FLEET_KEY": "fleet", **said}
        env["PYTHONPATH"] = f"{ROOT / 'libs'}:{ROOT}"
        self._log = folder / "ingress.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                launch.command("kvfleet.ingress.main", f"--parent-pid={os.getpid()}"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def hang_up(self) -> None:
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        self._process.kill()

    async def ready(self, url: str, verify: Path | None = None) -> None:
        """Until a request would be served."""

        context = ssl.create_default_context(cafile=verify) if verify is not None else False
        async with httpx.AsyncClient(verify=context, timeout=2, trust_env=False) as http, asyncio.timeout(LIMIT_S):
            while True:
                assert self._process.poll() is None, self.log
                try:
                    if (await http.get(f"{url}/readyz")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)

    async def stop(self) -> int:
        """Its exit code. The test's loop goes on: others have leases to renew."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return await asyncio.to_thread(self._process.wait, 20)
        finally:
            self._process.kill()


def write_certificate(cert: Path, key: Path, serial: int) -> None:
    """Signed by itself, for 127.0.0.1."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(serial)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
