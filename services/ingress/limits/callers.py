"""Callers and what each may do. Pure; `api_keys` and `oidc` make them. Without keys and without an issuer every caller
is `OPEN`: the tenant `public`, with an admin's rights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvfleet.ingress.requests.asks import MAX_PRIORITY
from kvproto.errors import InvalidRequest, PermissionDenied
from kvproto.ids import DEFAULT_TENANT

BURST_S = 10.0
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one caller, or of a tenant's callers together; 0: no limit. Tokens are prompt and generated ones."""

    max_concurrent: int = 0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    tokens_per_day: int = 0
    max_tokens: int = 0  # that one choice of a request may generate

    @property
    def are_counted(self) -> bool:
        return bool(self.max_concurrent or self.requests_per_minute or self.tokens_per_minute or self.tokens_per_day)

    @property
    def request_burst(self) -> float:
        return max(1.0, self.requests_per_minute / MINUTE_S * BURST_S)


NO_LIMITS = KeyLimits()
LIMITS = tuple(one.name for one in fields(KeyLimits))


def read_limits(entry: Mapping[str, Any], field: str) -> KeyLimits:
    """Raises InvalidRequest naming the limit that is wrong."""
    said: dict[str, Any] = {}
    for one in fields(KeyLimits):
        value = entry.get(one.name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidRequest("must be a number, at least 0", field=f"{field}.{one.name}")
        if not one.name.endswith("_per_minute") and value != int(value):
            raise InvalidRequest("must be an integer, at least 0", field=f"{field}.{one.name}")
        said[one.name] = float(value) if one.name.endswith("_per_minute") else int(value)
    return KeyLimits(**said)


@dataclass(frozen=True, slots=True)
class Caller:
    """The bearer of a key or token. `name` is unique within its tenant. Its requests may name these `policies` of
    placement (an admin's: any), and have a priority up to `max_priority`."""

    name: str
    tenant: str = DEFAULT_TENANT
    admin: bool = False
    limits: KeyLimits = NO_LIMITS
    tenant_limits: KeyLimits = NO_LIMITS
    policies: tuple[str, ...] = ()
    max_priority: int = 0

    @property
    def max_tokens(self) -> int:
        """Of one choice; 0: no limit."""
        said = [limits.max_tokens for limits in (self.limits, self.tenant_limits) if limits.max_tokens]
        return min(said, default=0)


OPEN = Caller(name="open", admin=True, max_priority=MAX_PRIORITY)


def require_admin(caller: Caller) -> None:
    """Raises PermissionDenied unless the key is an admin's."""
    if not caller.admin:
        raise PermissionDenied("an admin key is required", field="authorization")


def require_policy(caller: Caller, policy: str | None) -> None:
    """Raises PermissionDenied for a policy that this key may not name."""
    if policy is None or caller.admin or policy in caller.policies:
        return
    allowed = f"one of {', '.join(caller.policies)}" if caller.policies else "none"
    raise PermissionDenied(f"this API key may name {allowed}, got {policy[:64]!r}", field="policy")


def priority_of(caller: Caller, said: int | None) -> int:
    """`said`, by default 0 or the key's maximum if that is lower. Raises PermissionDenied above the maximum."""
    if said is None:
        return min(0, caller.max_priority)
    if said > caller.max_priority:
        raise PermissionDenied(f"this API key may ask for {caller.max_priority} at most, got {said}", field="priority")
    return said


def default_max_tokens(caller: Caller, said: int | None, field: str, default: int) -> int:
    """The bound of a request that names none. Raises InvalidRequest if `said` is beyond the caller's limit."""
    limit = caller.max_tokens
    if not limit:
        return default
    if said is not None and said > limit:
        raise InvalidRequest(f"requests with this API key may generate {limit} at most, got {said}", field=field)
    return min(default, limit)
