"""Loop: the keys of an issuer, fetched with httpx at the start, every few minutes, and when a token names an unknown
one, at most once in `COOLDOWN_S`. While the issuer does not answer, the last keys serve for a day; a token of an
unknown key is refused with 503, since it may be good.

Fetches need TLS unless the issuer is on this host, also for the URL in its description, and follow no redirects. They
check certificates against the system's authorities (`SSL_CERT_FILE` names others), not against httpx's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfleet.ingress.auth.oidc import OidcRules, caller_of, read_claims, read_head, refused
from kvfleet.ingress.limits.callers import Caller
from kvproto.errors import InvalidRequest, KvfleetError, Unavailable
from kvservice.lifecycle import in_daemon_thread

if TYPE_CHECKING:
    from jwt import PyJWK

log = logging.getLogger(__name__)

REFRESH_S = 300.0
COOLDOWN_S = 10.0
FETCH_S = 8.0  # that tokens with unknown keys wait at most
KEPT_S = 86_400.0  # without an answer of the issuer
MIN_RSA_BITS = 2048
TIMEOUT_S = 5.0
MAX_BYTES = 1024 * 1024
DISCOVERY = "/.well-known/openid-configuration"
_ON_THIS_HOST = ("127.0.0.1", "::1", "localhost")
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "kvfleet"}

Fetch = Callable[[], dict[str, Any]]


def read_key_set(key_set: dict[str, Any]) -> tuple[PyJWK, ...]:
    """The usable signing keys. Raises Unavailable if there is none."""
    import jwt

    listed = key_set.get("keys")
    out: list[PyJWK] = []
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
            continue
        if entry.get("use", "sig") != "sig" or "d" in entry:  # a private key has no business there
            continue
        try:
            found = jwt.PyJWK(entry)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, NotImplementedError):
            continue
        if entry["kty"] == "RSA" and found.key.key_size < MIN_RSA_BITS:
            continue
        out.append(found)
    if not out:
        raise Unavailable("the issuer's key set holds no key that could be used")
    return tuple(out)


@dataclass(eq=False, slots=True)
class IssuerKeys:
    """Owned by the event loop; `fetch` blocks, in a thread that no shutdown waits for."""

    rules: OidcRules
    fetch: Fetch
    now: Callable[[], float]
    refresh_s: float = REFRESH_S
    keys: tuple[PyJWK, ...] = ()
    fetches_total: int = 0
    failures_total: int = 0
    _fetched_at: float | None = None  # the last success
    _asked_at: float | None = None
    _fetching: asyncio.Task[None] | None = None

    @property
    def key_count(self) -> int:
        return len(self.keys)

    async def caller_of(self, token: str) -> Caller:
        """Raises AuthenticationFailed, PermissionDenied, and Unavailable while the issuer does not answer."""
        algorithm, kid = read_head(token, self.rules)
        key = await self._key_of(algorithm, kid)
        return caller_of(read_claims(token, algorithm, key.key, self.rules), self.rules)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(KvfleetError):
                await self.refresh()
            await asyncio.sleep(self.refresh_s if self._is_answering else COOLDOWN_S)

    async def refresh(self) -> None:
        """Fetch the keys now. Raises Unavailable; the old ones stay."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._refresh(), name="issuer-keys")
            self._fetching.add_done_callback(self._fetched)
        await asyncio.shield(self._fetching)

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetching = None
        if not task.cancelled():
            task.exception()  # those that wait have it

    async def _refresh(self) -> None:
        self._asked_at = self.now()
        self.fetches_total += 1
        try:
            async with asyncio.timeout(FETCH_S):
                keys = read_key_set(await in_daemon_thread(self.fetch))
        except (KvfleetError, TimeoutError) as error:
            self.failures_total += 1
            log.warning("the issuer's keys could not be had, %d are kept: %s", len(self.keys), str(error) or "too slow")
            raise Unavailable("the issuer's keys could not be had") from None
        if [key.key_id for key in keys] != [key.key_id for key in self.keys]:
            log.info("the issuer has %d keys", len(keys))
        self.keys = keys
        self._fetched_at = self.now()

    async def _key_of(self, algorithm: str, kid: str | None) -> PyJWK:
        if self._fetched_at is not None and self.now() - self._fetched_at > KEPT_S:
            self.keys = ()
        if (found := self._find(algorithm, kid)) is not None:
            return found
        if self._asked_at is None or self.now() - self._asked_at >= COOLDOWN_S or self._fetching is not None:
            with contextlib.suppress(KvfleetError):
                await self.refresh()
            if (found := self._find(algorithm, kid)) is not None:
                return found
        if not self._is_answering:
            raise Unavailable("the token's issuer does not answer: nobody can tell", retry_after_s=COOLDOWN_S)
        raise refused("the token is signed with a key that its issuer does not have")

    @property
    def _is_answering(self) -> bool:
        return self._fetched_at is not None and self._asked_at is not None and self._fetched_at >= self._asked_at

    def _find(self, algorithm: str, kid: str | None) -> PyJWK | None:
        """By its id; without one, the only key of the algorithm."""
        fitting = [key for key in self.keys if key.algorithm_name == algorithm]
        if kid is None:
            return fitting[0] if len(fitting) == 1 else None
        return next((key for key in fitting if key.key_id == kid), None)


def check_url(url: str, setting: str) -> None:
    """Raises InvalidRequest for a URL that keys must not come from."""
    import httpx  # here, so that only an ingress with an issuer's URL loads it, and the others start sooner

    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest("is no URL", field=setting) from None
    good = parts.scheme == "https" or (parts.scheme == "http" and parts.host in _ON_THIS_HOST)
    if not good or not parts.host or parts.userinfo:
        raise InvalidRequest("must be an https URL (http on this host only) without credentials", field=setting)


def fetch_key_set(issuer: str, url: str | None) -> dict[str, Any]:
    """From `url`, else from the URL in the issuer's description. Raises Unavailable."""
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
    """Raises Unavailable."""
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
