"""Configured API keys, and the limits of their tenants. Pure: text in, entries out.

Keys are configured by their SHA-256 (hex), so that neither file nor environment holds a usable one. The text is TOML
or JSON:

    [[keys]]                                 {"keys": [{"name": "search", "sha256": "9f86d0...", "tenant": "search"}]}
    name = "search"
    sha256 = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]    several: old and new at once
    tenant = "search"
    admin = false
    disabled = false
    not_after = 2027-01-01T00:00:00Z
    policies = ["ring", "direct"]
    max_priority = 10
    max_concurrent = 64                      and the other `callers.LIMITS`

    [tenants.search]                         limits of all its keys together
    tokens_per_minute = 200000

    [tenants."*"]                            of each tenant that has no table of its own

Messages repeat nothing of the text but names of fields: a key may stand there by mistake.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from kvfleet.ingress.limits.callers import LIMITS, NO_LIMITS, Caller, KeyLimits, read_limits
from kvfleet.ingress.requests.asks import MAX_PRIORITY
from kvproto.errors import InvalidRequest
from kvproto.ids import DEFAULT_TENANT, is_token

ANY_TENANT = "*"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.@/-]{0,63}\Z")
_FIELD = re.compile(r"[a-z_]{1,24}\Z")
_PLACE = re.compile(r"\(at [a-z0-9, ]*\)\Z")
_KNOWN = {"name", "sha256", "tenant", "admin", "disabled", "not_after", "policies", "max_priority", *LIMITS}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One configured key of `caller`, by the hashes of its texts."""

    sha256: tuple[str, ...]
    caller: Caller
    disabled: bool = False
    not_after: float | None = None  # unix seconds


@dataclass(frozen=True, slots=True)
class KeySet:
    keys: tuple[ApiKey, ...] = ()
    tenants: Mapping[str, KeyLimits] = field(default_factory=dict)

    def limits_of(self, tenant: str) -> KeyLimits:
        return self.tenants.get(tenant) or self.tenants.get(ANY_TENANT) or NO_LIMITS


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def parse_keys(*sources: str) -> KeySet:
    """Raises InvalidRequest naming the entry: a service must not start half guarded, and a half-written file must not
    count as one without keys."""
    entries: list[Any] = []
    tenants: dict[str, KeyLimits] = {}
    for source in sources:
        value = _parse(source)
        if isinstance(value, list):
            value = {"keys": value}
        is_table = isinstance(value, dict) and bool(value.keys() & {"keys", "tenants"})
        _require(is_table, "must hold a list of tables named keys", "api_keys")
        for unknown in value.keys() - {"keys", "tenants"}:
            raise InvalidRequest("unknown", field=f"api_keys: {_field(unknown)}")
        listed = value.get("keys", [])
        _require(isinstance(listed, list), "must be a list of tables named keys", "api_keys")
        entries += listed
        tenants |= _read_tenants(value.get("tenants", {}))
    table = KeySet(tenants=tenants)
    keys = tuple(_read_key(entry, f"api_keys[{i}]", table) for i, entry in enumerate(entries))
    names = [key.caller.name for key in keys]
    hashes = [one for key in keys for one in key.sha256]
    for what, values in (("name", names), ("sha256", hashes)):
        _require(len(set(values)) == len(values), f"two keys have the same {what}", "api_keys")
    return replace(table, keys=keys)


def _require(good: bool, what: str, field: str) -> None:
    if not good:
        raise InvalidRequest(what, field=field)


def _parse(source: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(source)
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        place = _PLACE.search(str(error))
        why = f"neither JSON nor TOML {place.group()}" if place else "neither JSON nor TOML"
        raise InvalidRequest(why, field="api_keys") from None


def _field(name: Any) -> str:
    return name if isinstance(name, str) and _FIELD.match(name) else "(not shown)"


def _read_tenants(value: Any) -> dict[str, KeyLimits]:
    _require(isinstance(value, dict), "must be a table of tables", "tenants")
    out: dict[str, KeyLimits] = {}
    for at, (tenant, entry) in enumerate(value.items()):
        named = tenant == ANY_TENANT or is_token(tenant)
        _require(named, "must be named with 1 to 64 of A-Z a-z 0-9 _ -, or *", f"tenants[{at}]")
        _require(isinstance(entry, dict), "must be a table", f"tenants.{tenant}")
        for unknown in entry.keys() - set(LIMITS):
            raise InvalidRequest("unknown", field=f"tenants.{tenant}.{_field(unknown)}")
        out[tenant] = read_limits(entry, f"tenants.{tenant}")
    return out


def _read_key(entry: Any, field: str, table: KeySet) -> ApiKey:
    _require(isinstance(entry, dict), "must be a table", field)
    for unknown in entry.keys() - _KNOWN:
        raise InvalidRequest("unknown", field=f"{field}.{_field(unknown)}")
    sha256 = entry.get("sha256")
    hashes = [sha256] if isinstance(sha256, str) else sha256
    hashed = isinstance(hashes, list) and hashes and all(isinstance(h, str) and _SHA256.match(h) for h in hashes)
    _require(bool(hashed), "must be the key's SHA-256 as 64 lower-case hex digits", f"{field}.sha256")
    name = entry.get("name", hashes[0][:8])
    named = isinstance(name, str) and _NAME.match(name) is not None
    _require(named, "must be 1 to 64 of A-Z a-z 0-9 _ . @ / - and space", f"{field}.name")
    tenant = entry.get("tenant", DEFAULT_TENANT)
    _require(isinstance(tenant, str) and is_token(tenant), "must be 1 to 64 of A-Z a-z 0-9 _ -", f"{field}.tenant")
    for flag in ("admin", "disabled"):
        _require(isinstance(entry.get(flag, False), bool), "must be a boolean", f"{field}.{flag}")
    highest = entry.get("max_priority", 0)
    within = type(highest) is int and -MAX_PRIORITY <= highest <= MAX_PRIORITY
    _require(within, f"must be an integer within [{-MAX_PRIORITY}, {MAX_PRIORITY}]", f"{field}.max_priority")
    limits = read_limits(entry, field)
    policies = entry.get("policies", [])  # only placement knows which exist
    are_names = isinstance(policies, list) and all(isinstance(one, str) and is_token(one) for one in policies)
    _require(are_names, "must be a list of names", f"{field}.policies")
    admin, shared = entry.get("admin", False), table.limits_of(tenant)
    caller = Caller(name, tenant, admin, limits, shared, policies=tuple(policies), max_priority=highest)
    not_after = _read_moment(entry.get("not_after"), f"{field}.not_after")
    return ApiKey(tuple(hashes), caller, entry.get("disabled", False), not_after)


def _read_moment(value: Any, field: str) -> float | None:
    """A date-time with an offset: TOML's own, or a string."""
    if value is None:
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidRequest("must be a date and time with an offset, as 2027-01-01T00:00:00Z", field=field)
    return value.timestamp()
