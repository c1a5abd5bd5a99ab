"""Wiring of API keys, an issuer, certificates and the audit log. Changed files are reloaded: by polling every half
second, or at once at SIGHUP.

A file must look the same twice, so that a half-written one is not taken. An unusable file is logged once, and the old
content stays; after a retryable error it is tried again at each poll.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvfleet.ingress.auth.api_keys import KeySet, parse_keys
from kvfleet.ingress.auth.jwks import IssuerKeys, check_url, fetch_key_set, read_key_file
from kvfleet.ingress.auth.key_files import check_tls, read_pair, read_sources, use_pair
from kvfleet.ingress.auth.oidc import OidcRules, read_algorithms
from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.settings import IngressSettings
from kvfleet.ingress.telemetry.audit import NO_AUDIT, Audit, AuditFile
from kvproto.errors import InvalidRequest, KvfleetError
from kvservice.lifecycle import Lifecycle
from kvservice.metrics import Reading

log = logging.getLogger(__name__)

POLL_S = 0.5
FILE_REFRESH_S = 1.0  # of an issuer's keys in a file
READINGS = (  # name, help, and where it is: part and attribute
    ("api_key_reloads_total", "API key files taken up.", "keys", "reloads_total"),
    (
        "api_key_reload_failures_total",
        "API key files that could not be used: the old keys stay.",
        "keys",
        "failures_total",
    ),
    ("issuer_keys", "Keys of the OIDC issuer.", "issuer", "key_count"),
    ("issuer_fetches_total", "Times that they were asked for.", "issuer", "fetches_total"),
    ("issuer_fetch_failures_total", "Times in vain.", "issuer", "failures_total"),
    ("audit_lines_total", "Lines of the audit log.", "audit", "written_total"),
    ("audit_dropped_lines_total", "Lines that were lost.", "audit", "dropped_total"),
)
S = TypeVar("S")


@dataclass(eq=False, slots=True)
class Reload(Generic[S]):
    """One source, owned by the loop. `read` blocks, in a thread; `take` raises KvfleetError for unusable content."""

    what: str
    read: Callable[[], S]
    take: Callable[[S], None]
    seen: S | str  # at the last look: the content, or why it could not be read
    on_reload: Callable[[str, str | None], None] = lambda what, why_not: None
    reloads_total: int = 0
    failures_total: int = 0
    _decided: S | str = field(init=False)  # the same, when that was last acted upon
    _told: int = 0  # calls of `now`

    def __post_init__(self) -> None:
        self._decided = self.seen

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            told = self._told
            said = await asyncio.to_thread(self._look)
            if told != self._told:
                continue  # this look is older than the content taken meanwhile
            if said == self.seen:
                self._decide(said)
            self.seen = said

    def now(self) -> None:
        """Reload without waiting for the content to settle, even if it was refused before."""
        self._told += 1
        self.seen = self._look()
        self._decided = ""
        self._decide(self.seen)

    def _look(self) -> S | str:
        try:
            return self.read()
        except KvfleetError as error:
            return str(error)

    def _decide(self, said: S | str) -> None:
        if said == self._decided:
            return
        self._decided = said
        try:
            if isinstance(said, str):
                raise KvfleetError(said)
            self.take(said)
        except KvfleetError as error:
            self.failures_total += 1
            if error.retryable:
                self._decided = ""
            log.error("%s: what is there now cannot be used, the old ones stay: %s", self.what, error)
            self.on_reload(self.what, str(error))
        else:
            self.reloads_total += 1
            log.info("%s: reloaded", self.what)
            self.on_reload(self.what, None)


class Access:
    """Owned by the process's main coroutine."""

    def __init__(self, settings: IngressSettings, now: Callable[[], float]) -> None:
        """Raises InvalidRequest naming the setting: an ingress must not start half guarded."""
        check_tls(settings.tls_cert, settings.tls_key)
        self._settings = settings
        self._reloads: list[Reload[Any]] = []
        self._audit_file = AuditFile(settings.audit_log) if settings.audit_log is not None else None
        self.audit = Audit(self._audit_file.write, time.time) if self._audit_file is not None else NO_AUDIT
        self._issuer = _issuer_of(settings, now)
        path = settings.api_keys_file
        texts = read_sources(path, "api_keys_file") if path is not None else ()
        keys = self._parse(texts)
        if path is not None and not keys.keys and self._issuer is None:
            raise InvalidRequest(f"{path} holds no key", field="api_keys_file")
        self.tenancy = Tenancy(keys, time.time, issuer=self._issuer, reloads=path is not None)
        self._keys_reload: Reload[Any] | None = None
        if path is not None:
            read = partial(read_sources, path, "api_keys_file")
            self._keys_reload = self._reload("API keys", read, lambda said: self.tenancy.use(self._parse(said)), texts)

    def _parse(self, texts: tuple[str, ...]) -> KeySet:
        said = self._settings.api_keys
        return parse_keys(*((said,) if said and said.strip() else ()), *texts)

    def _reload(self, what: str, read: Callable[[], Any], take: Callable[[Any], None], seen: Any) -> Reload[Any]:
        reload: Reload[Any] = Reload(what, read, take, seen=seen, on_reload=self.audit.reloaded)
        self._reloads.append(reload)
        return reload

    def serve_tls(self, context: ssl.SSLContext, life: Lifecycle) -> None:
        """New connections use renewed certificates."""
        cert, key = self._settings.tls_cert, self._settings.tls_key
        assert cert is not None
        assert key is not None

        read = partial(read_pair, cert, key)
        reload = self._reload("TLS certificate", read, lambda said: use_pair(context, *said), read())
        life.spawn(reload.run(), "reload")

    def start(self, life: Lifecycle) -> None:
        if self._audit_file is not None:
            life.closing("audit log", partial(asyncio.to_thread, self._audit_file.close))
        if self._issuer is not None:
            life.spawn(self._issuer.run(), "issuer")
        for reload in self._reloads:
            life.spawn(reload.run(), "reload")
        if self.tenancy.is_open and self._settings.host not in ("127.0.0.1", "::1", "localhost"):
            log.warning("no API keys and no issuer: everybody who reaches this port may do what an admin may")

    def reload_now(self) -> None:
        for reload in self._reloads:
            reload.now()

    def readings(self) -> list[Reading]:
        """What metrics show of it; 0 for absent parts."""
        parts = {"keys": self._keys_reload, "issuer": self._issuer, "audit": self._audit_file}
        return [
            Reading(f"kvfleet_ingress_{name}", help_, partial(getattr, parts[part], attribute, 0))
            for name, help_, part, attribute in READINGS
        ]


def _issuer_of(settings: IngressSettings, now: Callable[[], float]) -> IssuerKeys | None:
    """Its keys come from a URL, a file, or the URL in the issuer's description."""
    issuer, audience = settings.oidc_issuer, settings.oidc_audience
    if issuer is None:
        if settings.oidc_jwks is not None or audience is not None:
            raise InvalidRequest("missing: who signs the tokens", field="oidc_issuer")
        return None
    if not audience:
        raise InvalidRequest("missing: tokens for other services must not be good here", field="oidc_audience")
    given = {one.name: getattr(settings, f"oidc_{one.name}") for one in fields(OidcRules)}
    rules = OidcRules(**given | {"algorithms": read_algorithms(settings.oidc_algorithms)})
    said = settings.oidc_jwks
    if said is not None and "://" not in said:
        read = partial(read_key_file, Path(said))
        try:
            read()  # a file that is not there is a mistake; an issuer may come later
        except KvfleetError as error:
            raise InvalidRequest(error.message, field="oidc_jwks") from None
        return IssuerKeys(rules, read, now, FILE_REFRESH_S)
    check_url(said if said is not None else issuer, "oidc_jwks" if said is not None else "oidc_issuer")
    return IssuerKeys(rules, partial(fetch_key_set, issuer, said), now)
