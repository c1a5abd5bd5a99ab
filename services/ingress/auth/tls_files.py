"""Adapter: the certificate and the key of the HTTP endpoint."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from kvproto.errors import InvalidRequest, Unavailable


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Both or none. Raises InvalidRequest naming the setting."""
    if cert is not None and key is not None:
        check_pair(cert, key)
    elif cert is not None or key is not None:
        missing = "tls_key" if key is None else "tls_cert"
        raise InvalidRequest("missing: a certificate and its key belong together", field=missing)


def check_pair(cert: Path, key: Path) -> None:
    """Raises InvalidRequest for files that are no certificate with its key."""
    read_pair(cert, key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (ssl.SSLError, OSError):
        raise InvalidRequest(f"{cert} and {key} are no certificate with its key", field="tls_cert") from None


def read_pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Raises InvalidRequest."""
    try:
        return cert.read_bytes(), key.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{error.filename}: {error.strerror}", field="tls_cert") from None


def use_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Have a context serve this pair from now on; it stays as it was where that raises. InvalidRequest for what is no
    certificate with its key, Unavailable where it could not be taken just now.

    What is tried is what is used: files could be swapped in between, and a certificate that does not match leaves a
    context without a key. The key is written to no disk.
    """
    try:
        with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_path, key_path)
            except ssl.SSLError:
                raise InvalidRequest("what is there is no certificate with its key", field="tls_cert") from None
            context.load_cert_chain(cert_path, key_path)
    except OSError as error:
        raise Unavailable(f"the certificate was not taken: {error}") from None


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A file's path, for as long as it is needed: the ssl module reads files only."""
    number = os.memfd_create("kvfleet-tls")
    with open(number, "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{number}"
