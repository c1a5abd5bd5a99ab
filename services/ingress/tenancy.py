"""Who is calling: API key -> tenant, limits, admin flag. Pure.

Keys are configured by their SHA-256 (hex), so that neither file nor environment holds a usable one. The text is TOML
or JSON:

    [[keys]]                                 {"keys": [{"name": "search", "sha256": "9f86d0...", "tenant": "search"}]}
    name = "search"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "search"
    admin = false
    max_concurrent = 64
    requests_per_minute = 600
    policies = ["ring", "direct"]
    max_priority = 10

No keys: the ingress is open, everybody is the tenant `public` and may do what an admin may.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvproto.errors import AuthenticationFailed, InvalidRequest, PermissionDenied
from kvproto.ids import DEFAULT_TENANT, is_token
from services.ingress.placement_ask import MAX_PRIORITY

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_KNOWN = {"name", "sha256", "tenant", "admin", "max_concurrent", "requests_per_minute", "policies", "max_priority"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One configured key; 0 means no limit. `name` is what logs and limits call it.

    `policies` of placement may be named by its requests; an admin's may name any. `max_priority` is the highest that
    its requests may have.
    """

    name: str
    sha256: str
    tenant: str = DEFAULT_TENANT
    admin: bool = False
    max_concurrent: int = 0
    requests_per_minute: float = 0.0
    policies: tuple[str, ...] = ()
    max_priority: int = 0


OPEN = ApiKey(name="open", sha256="", admin=True, max_priority=MAX_PRIORITY)


def parse_keys(source: str) -> tuple[ApiKey, ...]:
    """Keys from TOML or JSON text. Raises InvalidRequest naming the entry: a service must not start half guarded."""
    if not source.strip():
        return ()
    value = _parse(source)
    entries = value.get("keys") if isinstance(value, dict) else value
    if not isinstance(entries, list):
        raise InvalidRequest("must be a list of tables named keys", field="api_keys")
    keys = tuple(_read_key(entry, f"api_keys[{i}]") for i, entry in enumerate(entries))
    for what in ("name", "sha256"):
        seen = [getattr(key, what) for key in keys]
        if len(set(seen)) != len(seen):
            raise InvalidRequest(f"two keys have the same {what}", field="api_keys")
    return keys


def _parse(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError:
        pass
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"neither JSON nor TOML: {error}", field="api_keys") from None


def _read_key(entry: Any, field: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise InvalidRequest("must be a table", field=field)
    for unknown in entry.keys() - _KNOWN:
        raise InvalidRequest("unknown", field=f"{field}.{unknown}")
    sha256 = entry.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.match(sha256):
        raise InvalidRequest("must be the key's SHA-256 as 64 lower-case hex digits", field=f"{field}.sha256")
    tenant = entry.get("tenant", DEFAULT_TENANT)
    if not isinstance(tenant, str) or not is_token(tenant):
        raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field=f"{field}.tenant")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise InvalidRequest("must be a boolean", field=f"{field}.admin")
    for limit in ("max_concurrent", "requests_per_minute"):
        value = entry.get(limit, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InvalidRequest("must be a number, at least 0", field=f"{field}.{limit}")
    max_priority = entry.get("max_priority", 0)
    if type(max_priority) is not int or not -MAX_PRIORITY <= max_priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"must be an integer within [{-MAX_PRIORITY}, {MAX_PRIORITY}]", field=f"{field}.max_priority"
        )
    return ApiKey(
        name=str(entry.get("name", sha256[:8])),
        sha256=sha256,
        tenant=tenant,
        admin=admin,
        max_concurrent=int(entry.get("max_concurrent", 0)),
        requests_per_minute=float(entry.get("requests_per_minute", 0)),
        policies=_read_policies(entry.get("policies", []), f"{field}.policies"),
        max_priority=max_priority,
    )


def _read_policies(value: Any, field: str) -> tuple[str, ...]:
    """Names as placement has them; which there are only placement knows."""
    if not isinstance(value, list) or not all(isinstance(name, str) and is_token(name) for name in value):
        raise InvalidRequest("must be a list of names", field=field)
    return tuple(value)


def hash_key(key: str) -> str:
    """What a configuration holds instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Tenancy:
    """The configured keys. Immutable after construction.

    Keys are looked up by their hash, so the time a look-up takes says nothing about a key's characters.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._by_hash = {key.sha256: key for key in keys}

    @property
    def is_open(self) -> bool:
        return not self._by_hash

    @property
    def tenants(self) -> frozenset[str]:
        """Whose keys there are; of an open ingress the one that everybody is."""
        return frozenset(key.tenant for key in self._by_hash.values()) or frozenset((OPEN.tenant,))

    def authenticate(self, authorization: str | None, api_key: str | None = None) -> ApiKey:
        """From `Authorization: Bearer <key>` or `x-api-key`. Raises AuthenticationFailed."""
        if self.is_open:
            return OPEN
        scheme, _, presented = (authorization or "").partition(" ")
        key = presented.strip() if scheme.lower() == "bearer" else api_key
        if not key:
            raise AuthenticationFailed("no API key: send `Authorization: Bearer <key>`", field="authorization")
        found = self._by_hash.get(hash_key(key))
        if found is None:
            raise AuthenticationFailed("this API key is not known", field="authorization")
        return found


def require_admin(caller: ApiKey) -> None:
    """Raises PermissionDenied unless the key is an admin's."""
    if not caller.admin:
        raise PermissionDenied("an admin key is required", field="authorization")


def require_policy(caller: ApiKey, policy: str | None) -> None:
    """Raises PermissionDenied unless the key's requests may name this policy; None is no policy."""
    if policy is None or caller.admin or policy in caller.policies:
        return
    allowed = f"one of {', '.join(caller.policies)}" if caller.policies else "none"
    raise PermissionDenied(f"this API key may name {allowed}, got {policy[:64]!r}", field="policy")


def priority_of(caller: ApiKey, said: int | None) -> int:
    """That of a request with this key: 0 unless it says otherwise, or the key's own where that is below.

    Raises PermissionDenied for one above what the key's requests may have.
    """
    if said is None:
        return min(0, caller.max_priority)
    if said > caller.max_priority:
        raise PermissionDenied(f"this API key may ask for {caller.max_priority} at most, got {said}", field="priority")
    return said
