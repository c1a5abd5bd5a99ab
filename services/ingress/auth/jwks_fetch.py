"""Adapter: fetches the key set of an issuer with httpx; blocking, for a thread, which no shutdown waits for.

TLS is asked for wherever the issuer is not on this host, also of what the issuer's own description names; redirects are
not followed. Certificates are checked against the system's authorities (`SSL_CERT_FILE` names others), not against
those that httpx would bring. What an answer means, 503 or 401, is decided in `jwks`.
"""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

from kvproto.errors import InvalidRequest, Unavailable

TIMEOUT_S = 5.0
MAX_BYTES = 1024 * 1024
DISCOVERY = "/.well-known/openid-configuration"
_ON_THIS_HOST = ("127.0.0.1", "::1", "localhost")
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "kvfleet"}


def check_url(url: str, setting: str) -> None:
    """Raises InvalidRequest for one that keys must not come from."""
    import httpx  # here, so that only an ingress with an issuer's URL loads it, and the others start sooner

    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest("is no URL", field=setting) from None
    good = parts.scheme == "https" or (parts.scheme == "http" and parts.host in _ON_THIS_HOST)
    if not good or not parts.host or parts.userinfo:
        raise InvalidRequest("must be an https URL (http on this host only) without credentials", field=setting)


def fetch_key_set(issuer: str, url: str | None) -> dict[str, Any]:
    """The key set at `url`, else where the issuer's description says. Raises Unavailable."""
    if url is None:
        described = _fetch_json(issuer.rstrip("/") + DISCOVERY)
        if described.get("issuer") != issuer:
            raise Unavailable("the issuer's description is of another issuer")
        url = described.get("jwks_uri")
        if not isinstance(url, str):
            raise Unavailable("the issuer's description has no jwks_uri")
        try:
            check_url(url, "jwks_uri")
        except InvalidRequest as error:
            raise Unavailable(str(error)) from None
    return _fetch_json(url)


def read_key_file(path: Path) -> dict[str, Any]:
    """The same from a file. Raises Unavailable."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from None
    except ValueError:
        raise Unavailable(f"{path} is no JSON") from None
    if not isinstance(value, dict):
        raise Unavailable(f"{path} holds no object")
    return value


def _fetch_json(url: str) -> dict[str, Any]:
    import httpx

    failures = (httpx.HTTPError, OSError, ValueError, httpx.InvalidURL, ImportError)  # the last two: of a proxy's URL
    data = bytearray()
    try:
        with httpx.stream(
            "GET", url, headers=_HEADERS, timeout=TIMEOUT_S, follow_redirects=False, verify=ssl.create_default_context()
        ) as answer:
            if not answer.is_success:
                raise Unavailable(f"the issuer answers {answer.status_code}")
            for part in answer.iter_raw():  # one that is compressed all the same could unfold to any size
                data += part
                if len(data) > MAX_BYTES:
                    raise Unavailable(f"the issuer's answer is longer than {MAX_BYTES} bytes")
    except failures as error:
        raise Unavailable(f"the issuer does not answer: {type(error).__name__}") from None
    try:
        value = json.loads(data)
    except ValueError:
        raise Unavailable("the issuer's answer is no JSON") from None
    if not isinstance(value, dict):
        raise Unavailable("the issuer's answer is no object")
    return value
