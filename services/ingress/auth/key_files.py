"""Adapter: files of API keys, and the certificate of the HTTP endpoint with its key."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from kvproto.errors import InvalidRequest, Unavailable

MAX_FILE_BYTES = 16 * 1024 * 1024


def read_sources(path: Path, setting: str) -> tuple[str, ...]:
    """The texts of a file, or of a folder's files by name. Raises InvalidRequest naming the setting.

    Hidden names are left out: in a secret mounted by Kubernetes all files are links into a hidden folder.
    """
    try:
        if not path.is_dir():
            return (_read(path),)
        files = sorted(one for one in path.iterdir() if not one.name.startswith(".") and one.is_file())
        texts = tuple(_read(one) for one in files)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field=setting) from None
    except ValueError:
        raise InvalidRequest(f"{path}: not text in UTF-8 of at most {MAX_FILE_BYTES} bytes", field=setting) from None
    if not texts:
        raise InvalidRequest(f"{path} holds no file", field=setting)
    return texts


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError
    return data.decode()


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raises InvalidRequest naming the setting: for one without the other, and for files that do not match."""
    if cert is not None and key is not None:
        read_pair(cert, key)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        except (ssl.SSLError, OSError):
            raise InvalidRequest(f"{cert} and {key} are no certificate with its key", field="tls_cert") from None
    elif cert is not None or key is not None:
        missing = "tls_key" if key is None else "tls_cert"
        raise InvalidRequest("missing: a certificate and its key belong together", field=missing)


def read_pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Raises InvalidRequest."""
    try:
        return cert.read_bytes(), key.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{error.filename}: {error.strerror}", field="tls_cert") from None


def use_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Have a context serve this pair. Raises InvalidRequest for a pair that does not match, Unavailable where it could
    not be loaded just now; the context stays as it was then.

    The bytes that are tried are the bytes that are used: files could be swapped in between, and a certificate that does
    not match leaves a context without a key. The key is written to no disk.
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
    """The path of a file in memory: the ssl module reads files only."""
    number = os.memfd_create("kvfleet-tls")
    with open(number, "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{number}"
