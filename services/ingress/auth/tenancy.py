"""Finds the caller of a request, by API key or the issuer's token. The keys may be replaced while requests run. A key
is looked up by its SHA-256, so the time of a look-up says nothing about its characters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvfleet.ingress.auth.api_keys import ApiKey, KeySet, hash_key
from kvfleet.ingress.auth.jwks import IssuerKeys
from kvfleet.ingress.auth.oidc import refused
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.limits.callers import OPEN, Caller
from kvproto.errors import AuthenticationFailed, Unavailable

MAX_PRESENTED_CHARS = 16 * 1024


@dataclass(eq=False)
class Tenancy:
    """Owned by the event loop. `reloads`: the keys may change later."""

    keys: KeySet
    unix_s: Callable[[], float]
    issuer: IssuerKeys | None = None
    reloads: bool = False
    refused_total: int = 0

    def __post_init__(self) -> None:
        self.is_open = not self.keys.keys and self.issuer is None
        self.use(self.keys)

    def use(self, keys: KeySet) -> None:
        """Replaces the keys. An ingress that was not open never becomes so."""
        self.keys = keys
        self._by_hash: dict[str, ApiKey] = {one: key for key in keys.keys for one in key.sha256}

    @property
    def key_count(self) -> int:
        return len(self.keys.keys)

    @property
    def has_one_tenant(self) -> bool:
        """Whether all callers, now and later, are of one tenant."""
        if self.is_open:
            return True
        return self.issuer is None and not self.reloads and len({k.caller.tenant for k in self.keys.keys}) == 1

    def caller_named(self, tenant: str, name: str) -> Caller:
        """Who asked for something earlier; one whose key is gone has no limits of its own."""
        if self.is_open:
            return OPEN
        known = (key.caller for key in self.keys.keys if (key.caller.tenant, key.caller.name) == (tenant, name))
        return next(known, Caller(name, tenant, tenant_limits=self.keys.limits_of(tenant)))

    async def identify(self, exchange: Exchange) -> Caller:
        """Sets the exchange's caller. Raises as `authenticate` does."""
        caller = await self.authenticate(exchange.header(b"authorization"), exchange.header(b"x-api-key"))
        exchange.caller = caller
        return caller

    async def authenticate(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """From `Authorization: Bearer <key or token>` or `x-api-key: <key>`. Raises AuthenticationFailed; for a token
        also PermissionDenied without a tenant, and Unavailable while its issuer does not answer."""
        if self.is_open:
            return OPEN
        try:
            return await self._authenticate(authorization, api_key)
        except (AuthenticationFailed, Unavailable):
            self.refused_total += 1
            raise

    async def _authenticate(self, authorization: str | None, api_key: str | None) -> Caller:
        scheme, _, said = (authorization or "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        presented = said.strip() if is_bearer else api_key
        if not presented:
            raise refused("no API key: send `Authorization: Bearer <key>`")
        if len(presented) > MAX_PRESENTED_CHARS:
            raise refused("this is too long for an API key")
        found = self._by_hash.get(hash_key(presented))
        if found is not None:
            if found.disabled:
                raise refused("this API key is disabled")
            if found.not_after is not None and self.unix_s() >= found.not_after:
                raise refused("this API key has expired")
            return found.caller
        if self.issuer is None or not is_bearer or presented.count(".") != 2:
            raise refused("this API key is not known")
        caller = await self.issuer.caller_of(presented)
        return replace(caller, tenant_limits=self.keys.limits_of(caller.tenant))
