"""A certificate that is renewed while connections are served: never half of it, and a race costs no process."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvfleet.ingress.auth import access as access_module
from kvfleet.ingress.auth.access import Access
from kvfleet.ingress.auth.key_files import use_pair
from kvfleet.ingress.settings import IngressSettings
from kvproto.errors import InvalidRequest
from kvservice.lifecycle import Lifecycle
from tests.support.waiting import LIMIT_S


def pair(name: str) -> tuple[bytes, bytes]:
    """Self-signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), secret


def shown_by(context: ssl.SSLContext) -> str:
    """Who a server of this context says that it is, in a whole handshake."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    (name,) = x509.load_der_x509_certificate(shown).subject
    return str(name.value)


def test_a_pair_that_does_not_match_leaves_the_old_one() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    use_pair(context, *pair("old"))
    for wrong in ((pair("new")[0], pair("other")[1]), (b"", b""), (b"x" * 100_000, pair("new")[1])):
        with pytest.raises(InvalidRequest, match="no certificate"):
            use_pair(context, *wrong)
        assert shown_by(context) == "old"
    use_pair(context, *pair("new"))
    assert shown_by(context) == "new"


class Raced(ssl.SSLContext):
    """The files are swapped between the check and the load: what the load says then."""

    faults: list[Exception]

    def load_cert_chain(self, *paths: Any, **options: Any) -> None:
        if self.faults:
            raise self.faults.pop()
        super().load_cert_chain(*paths, **options)


@pytest.mark.parametrize("fault", [ssl.SSLError("key values mismatch"), FileNotFoundError("tls.key")])
async def test_a_swap_in_the_middle_of_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(access_module, "POLL_S", 0.02)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def write(name: str) -> None:
        for path, data in zip((cert, key), pair(name), strict=True):
            path.write_bytes(data)

    write("old")
    access, life = Access(IngressSettings(tls_cert=cert, tls_key=key), lambda: 0.0), Lifecycle()
    context = Raced(ssl.PROTOCOL_TLS_SERVER)
    context.faults = []
    context.load_cert_chain(cert, key)
    access.serve_tls(context, life)
    context.faults = [fault]
    write("new")
    async with asyncio.timeout(LIMIT_S):
        while shown_by(context) != "new":
            assert not life.stopping.is_set()
            await asyncio.sleep(0.01)
    assert not context.faults
    for task in life.tasks.running:
        task.cancel()
    await asyncio.gather(*life.tasks.running, return_exceptions=True)
