"""The claims of an issuer's tokens. Pure: the key is passed in, the clock is PyJWT's. A token's algorithm must be one
that is allowed here and that of its key, so a public key never serves as an HMAC's secret, and `none` is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfleet.ingress.limits.callers import NO_LIMITS, Caller, KeyLimits, read_limits
from kvproto.errors import AuthenticationFailed, InvalidRequest, PermissionDenied
from kvproto.ids import is_token

ALGORITHMS = ("RS256", "ES256", "EdDSA")  # all that may be allowed: signatures whose secret half stays with the issuer
MAX_SUBJECT_CHARS = 128
REFUSALS = {  # by the name of PyJWT's error or of its base
    "ExpiredSignatureError": "the token has expired",
    "ImmatureSignatureError": "the token is not valid yet",
    "InvalidAudienceError": "the token is for another audience",
    "InvalidIssuerError": "the token is of another issuer",
    "InvalidSignatureError": "the token's signature is wrong",
}


@dataclass(frozen=True, slots=True)
class OidcRules:
    """A claim is named by its name, or by a path with dots. An admin's claim is or holds `admin_value`."""

    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ALGORITHMS
    tenant_claim: str = "tenant"
    admin_claim: str | None = None
    admin_value: str = "kvfleet-admin"
    limits_claim: str | None = None
    leeway_s: float = 60.0


def read_algorithms(said: str) -> tuple[str, ...]:
    """Reads a setting. Raises InvalidRequest for an algorithm that must not be allowed."""
    names = tuple(name.strip() for name in said.split(",") if name.strip())
    if not names or any(name not in ALGORITHMS for name in names):
        raise InvalidRequest(f"must be some of {', '.join(ALGORITHMS)}", field="oidc_algorithms")
    return names


def read_head(token: str, rules: OidcRules) -> tuple[str, str | None]:
    """Algorithm and key id, unverified. Raises AuthenticationFailed for no token, or a forbidden algorithm."""
    import jwt  # here, so that only an ingress with an issuer loads it, and the others start sooner

    try:
        head = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise refused("this is neither a known API key nor a token") from None
    algorithm, kid = head.get("alg"), head.get("kid")
    if algorithm not in rules.algorithms:
        raise refused("the token is signed with an algorithm that is not allowed")
    if kid is not None and not isinstance(kid, str):
        raise refused("the token's kid is no text")
    return algorithm, kid


def read_claims(token: str, algorithm: str, key: Any, rules: OidcRules) -> dict[str, Any]:
    """Checks signature, issuer, audience and times. Raises AuthenticationFailed."""
    import jwt

    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=rules.audience,
            issuer=rules.issuer,
            leeway=rules.leeway_s,
            options={"require": ["exp", "iss", "aud", "sub"]},
        )
    except jwt.MissingRequiredClaimError as error:
        raise refused(f"the token lacks {error.claim}") from None
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        known = (REFUSALS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in REFUSALS)
        raise refused(next(known, "the token is malformed")) from None
    return claims


def caller_of(claims: dict[str, Any], rules: OidcRules) -> Caller:
    """The bearer of a verified token. Raises PermissionDenied for one that lacks a needed claim."""
    subject = claims["sub"]
    if not 1 <= len(subject) <= MAX_SUBJECT_CHARS or not subject.isprintable():
        raise PermissionDenied(f"the token's sub is not 1 to {MAX_SUBJECT_CHARS} characters", field="authorization")
    tenant = claim_at(claims, rules.tenant_claim)
    if not isinstance(tenant, str) or not is_token(tenant):
        problem = "lacks" if tenant is None else "must have 1 to 64 of A-Z a-z 0-9 _ - in"
        raise PermissionDenied(f"the token {problem} the claim {rules.tenant_claim}", field="authorization")
    admin = False
    if rules.admin_claim is not None:
        said = claim_at(claims, rules.admin_claim)
        admin = rules.admin_value in (said if isinstance(said, list) else [said])
    return Caller(f"oidc:{subject}", tenant, admin, _limits_of(claims, rules))


def _limits_of(claims: dict[str, Any], rules: OidcRules) -> KeyLimits:
    said = claim_at(claims, rules.limits_claim) if rules.limits_claim is not None else None
    if said is None:
        return NO_LIMITS
    if isinstance(said, dict):
        try:
            return read_limits(said, rules.limits_claim or "")
        except InvalidRequest:
            pass
    raise PermissionDenied(f"the token's claim {rules.limits_claim} is no table of limits", field="authorization")


def claim_at(claims: dict[str, Any], name: str) -> Any:
    """By its name (`https://example.com/tenant`), else by its path (`realm_access.roles`); None if absent."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def refused(why: str) -> AuthenticationFailed:
    return AuthenticationFailed(why, field="authorization")
