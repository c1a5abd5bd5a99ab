"""Tokens of an OIDC issuer: which are good, whose they are, and how its keys come here. Issuer and keys are real."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from kvfleet.ingress.auth.api_keys import hash_key, parse_keys
from kvfleet.ingress.auth.jwks import (
    COOLDOWN_S,
    KEPT_S,
    MAX_BYTES,
    IssuerKeys,
    check_url,
    fetch_key_set,
    read_key_file,
    read_key_set,
)
from kvfleet.ingress.auth.oidc import OidcRules, caller_of, claim_at, read_algorithms, read_claims
from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.limits.callers import KeyLimits
from kvproto.errors import AuthenticationFailed, InvalidRequest, KvfleetError, PermissionDenied, Unavailable
from tests.support.local_issuer import AUDIENCE, LocalIssuer, hmac_token, private_key, public_jwk, public_pem, token
from tests.support.waiting import LIMIT_S

ALL = ("RS256", "ES256", "EdDSA")


@pytest.fixture
def issuer() -> Iterator[LocalIssuer]:
    issuer = LocalIssuer()
    issuer.keys = [public_jwk(algorithm, f"of-{algorithm}") for algorithm in ALL]
    yield issuer
    issuer.stop()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def keys_of(issuer: LocalIssuer, clock: Clock | None = None, **rules: Any) -> IssuerKeys:
    said = OidcRules(**{"issuer": issuer.url, "audience": AUDIENCE, **rules})
    return IssuerKeys(said, partial(fetch_key_set, issuer.url, None), clock or Clock())


def good(issuer: LocalIssuer, algorithm: str = "RS256", **more: Any) -> str:
    return token(issuer.url, algorithm=algorithm, kid=f"of-{algorithm}", **more)


@pytest.mark.parametrize("algorithm", ALL)
async def test_good_tokens(issuer: LocalIssuer, algorithm: str) -> None:
    caller = await keys_of(issuer).caller_of(good(issuer, algorithm))
    assert (caller.name, caller.tenant, caller.admin) == ("oidc:someone", "acme", False)
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]


def bad_tokens(issuer: LocalIssuer) -> dict[str, str]:
    now, rs = int(time.time()), "of-RS256"
    said = {"iss": issuer.url, "aud": AUDIENCE, "sub": "x", "tenant": "acme", "exp": now + 9}
    signed = good(issuer)
    head, claims, signature = signed.split(".")
    _, other_claims, _ = good(issuer, sub="admin").split(".")
    return {
        "expired": good(issuer, exp=now - 120),
        "expires never": good(issuer, exp=None),
        "not valid yet": good(issuer, nbf=now + 120),
        "for another": good(issuer, aud="another"),
        "for nobody": good(issuer, aud=None),
        "of another issuer": good(issuer, iss="https://elsewhere.example"),
        "of no issuer": good(issuer, iss=None),
        "of nobody": good(issuer, sub=None),
        "of a number": good(issuer, sub=5),
        "unsigned": jwt.encode(said, None, "none"),
        "unsigned with a kid": jwt.encode(said, None, "none", {"kid": rs}),
        "the public key as a secret": hmac_token(issuer.url, public_pem("RS256", rs), rs),
        "the public JWK as a secret": hmac_token(issuer.url, json.dumps(public_jwk("RS256", rs)).encode(), rs),
        "another algorithm": jwt.encode(said, private_key("RS256", rs), "RS512", {"kid": rs}),
        "another key's id": token(issuer.url, algorithm="RS256", kid="else", head={"kid": rs}),
        "another kind of key's id": token(issuer.url, algorithm="ES256", kid="else", head={"kid": rs}),
        "unknown key": token(issuer.url, kid="of-nobody"),
        "another signature": head + "." + claims + "." + signature[:-8] + "AAAAAAAA",
        "other claims": f"{head}.{other_claims}.{signature}",
        "no signature": f"{head}.{claims}.",
        "two dots": "..",
        "noise": "a.b.c",
        "not ASCII": "ä.ö.ü",
    }


async def test_bad_tokens(issuer: LocalIssuer) -> None:
    keys = keys_of(issuer)
    for what, bad in bad_tokens(issuer).items():
        with pytest.raises(AuthenticationFailed) as error:
            await keys.caller_of(bad)
        for part in bad.split("."):
            assert len(part) < 3 or part not in error.value.message, what
    assert keys.fetches_total == 1, "unknown keys do not make it ask again and again"
    assert await keys.caller_of(good(issuer)), "and it still knows good ones"


def test_a_refusal_says_why_for_kinds_of_a_known_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Expired(jwt.ExpiredSignatureError):
        """As a later PyJWT may have."""

    def decode(*_: object, **__: object) -> None:
        raise Expired

    monkeypatch.setattr(jwt, "decode", decode)
    with pytest.raises(AuthenticationFailed, match="expired"):
        read_claims("a.b.c", "RS256", None, OidcRules("https://issuer.example", AUDIENCE))


async def test_clocks_may_differ_a_little(issuer: LocalIssuer) -> None:
    now = int(time.time())
    keys = keys_of(issuer, leeway_s=30)
    assert await keys.caller_of(good(issuer, exp=now - 20))
    assert await keys.caller_of(good(issuer, nbf=now + 20))
    with pytest.raises(AuthenticationFailed):
        await keys.caller_of(good(issuer, exp=now - 40))


async def test_only_allowed_algorithms(issuer: LocalIssuer) -> None:
    keys = keys_of(issuer, algorithms=("ES256",))
    assert await keys.caller_of(good(issuer, "ES256"))
    with pytest.raises(AuthenticationFailed, match="not allowed"):
        await keys.caller_of(good(issuer, "RS256"))
    assert read_algorithms("ES256, EdDSA") == ("ES256", "EdDSA")
    for said in ("", "none", "HS256", "RS256,HS256", "rs256"):
        with pytest.raises(InvalidRequest):
            read_algorithms(said)


async def test_a_token_without_a_key_id(issuer: LocalIssuer) -> None:
    assert await keys_of(issuer).caller_of(good(issuer, head={}))
    issuer.keys.append(public_jwk("RS256", "second"))
    with pytest.raises(AuthenticationFailed):
        await keys_of(issuer).caller_of(good(issuer, head={}))


async def test_new_keys_are_fetched_but_not_too_often(issuer: LocalIssuer) -> None:
    clock = Clock()
    keys = keys_of(issuer, clock)
    assert await keys.caller_of(good(issuer))
    issuer.keys = [public_jwk("RS256", "new")]
    with pytest.raises(AuthenticationFailed):
        await keys.caller_of(token(issuer.url, kid="new"))
    clock.now += COOLDOWN_S
    answers = await asyncio.gather(*(keys.caller_of(token(issuer.url, kid="new")) for _ in range(10)))
    assert {caller.tenant for caller in answers} == {"acme"}
    assert keys.fetches_total == 2, "all wait for the same one"
    with pytest.raises(AuthenticationFailed):
        await keys.caller_of(good(issuer))  # the old key is gone with its issuer's word


async def test_an_issuer_that_does_not_answer(issuer: LocalIssuer) -> None:
    clock = Clock()
    keys = keys_of(issuer, clock)
    issuer.away = True
    with pytest.raises(Unavailable) as error:  # nobody can tell
        await keys.caller_of(good(issuer))
    assert error.value.retry_after_s == COOLDOWN_S
    issuer.away = False
    clock.now += COOLDOWN_S
    assert await keys.caller_of(good(issuer))
    issuer.away = True
    clock.now += 1000.0
    with pytest.raises(Unavailable):
        await keys.caller_of(token(issuer.url, kid="new"))
    assert await keys.caller_of(good(issuer)), "the keys that are known go on"
    clock.now += KEPT_S
    with pytest.raises(Unavailable):  # but not for ever: it may have taken them back
        await keys.caller_of(good(issuer))
    assert keys.failures_total == 3


async def test_keys_are_kept_up_to_date(issuer: LocalIssuer) -> None:
    rules = OidcRules(issuer.url, AUDIENCE)
    keys = IssuerKeys(rules, partial(fetch_key_set, issuer.url, issuer.url + "/keys"), time.monotonic, refresh_s=0.01)
    running = asyncio.create_task(keys.run())
    async with asyncio.timeout(LIMIT_S):
        while keys.key_count != 3:
            await asyncio.sleep(0.005)
        issuer.keys = issuer.keys[:1]
        while keys.key_count != 1:
            await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(issuer.asked) == {"/keys"}, "where it was told, without the description"


def test_what_an_issuer_may_not_do(issuer: LocalIssuer) -> None:
    for described in ({"issuer": "https://other.example"}, {"jwks_uri": None}, {"jwks_uri": "http://other.example/k"},
                      {"jwks_uri": "file:///etc/passwd"}):  # fmt: skip
        issuer.described = described
        with pytest.raises(Unavailable):
            fetch_key_set(issuer.url, None)
    issuer.described, issuer.redirect = {}, issuer.url + "/keys"
    with pytest.raises(Unavailable):
        fetch_key_set(issuer.url, None)
    issuer.redirect = None
    assert len(fetch_key_set(issuer.url, None)["keys"]) == 3
    issuer.keys.append({"kty": "x" * MAX_BYTES})
    with pytest.raises(Unavailable, match="longer than"):
        fetch_key_set(issuer.url, None)
    for url in (
        "http://issuer.example",
        "file:///etc/passwd",
        "https://u:p@issuer.example",
        "issuer",
        "https://",
        "http://[",
    ):
        with pytest.raises(InvalidRequest) as error:
            check_url(url, "oidc_issuer")
        assert error.value.field == "oidc_issuer"
    check_url("https://issuer.example/realms/x", "oidc_issuer")


def test_keys_that_are_of_no_use() -> None:
    weak = json.loads(RSAAlgorithm.to_jwk(rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()))
    other = json.loads(ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP384R1()).public_key()))
    useless = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"},
        {**weak, "kid": "weak"},
        {**public_jwk("RS256", "k1"), "use": "enc"},
        {**public_jwk("RS256", "k1"), "alg": "HS256"},
        {**public_jwk("RS256", "k1"), "alg": "none"},
        json.loads(RSAAlgorithm.to_jwk(private_key("RS256", "k1"))),
        {"kty": "EC"},
        {"kty": "OKP", "crv": "X25519", "x": "AA"},
        5,
    ]
    with pytest.raises(Unavailable):
        read_key_set({"keys": useless})
    read = read_key_set({"keys": [*useless, {**other, "kid": "p384"}, public_jwk("EdDSA", "good")]})
    assert [(key.key_id, key.algorithm_name) for key in read] == [("p384", "ES384"), ("good", "EdDSA")]
    for value in ({}, {"keys": 5}, {"keys": []}):
        with pytest.raises(Unavailable):
            read_key_set(value)


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [public_jwk("ES256", "k")]}))
    assert read_key_set(read_key_file(path))[0].key_id == "k"
    for text in ("", "[]", "{"):
        path.write_text(text)
        with pytest.raises(Unavailable):
            read_key_file(path)
    with pytest.raises(Unavailable):
        read_key_file(tmp_path / "none")


RULES = OidcRules("https://i", AUDIENCE, admin_claim="realm.roles", limits_claim="https://kvfleet/limits")


def test_what_claims_become() -> None:
    caller = caller_of(
        {
            "sub": "me",
            "tenant": "t-1",
            "realm": {"roles": ["user", "kvfleet-admin"]},
            "https://kvfleet/limits": {"tokens_per_minute": 600, "max_tokens": 5, "other": 1},
        },
        RULES,
    )
    assert (caller.tenant, caller.admin) == ("t-1", True)
    assert caller.limits == KeyLimits(tokens_per_minute=600.0, max_tokens=5)
    assert (caller.policies, caller.max_priority) == ((), 0)
    assert not caller_of({"sub": "me", "tenant": "t", "realm": {"roles": "kvfleet-admins"}}, RULES).admin
    assert caller_of({"sub": "me", "tenant": "t", "realm": {"roles": "kvfleet-admin"}}, RULES).admin
    plain = OidcRules("https://i", AUDIENCE)
    assert not caller_of({"sub": "me", "tenant": "t", "admin": True}, plain).admin
    assert claim_at({"a": {"b": 1}, "a.b": 2}, "a.b") == 2
    assert claim_at({"a": 5}, "a.b") is None


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"tenant": None},
        {"tenant": "a.b"},
        {"tenant": "*"},
        {"tenant": ">"},
        {"tenant": ""},
        {"tenant": "x" * 65},
        {"tenant": ["t"]},
        {"tenant": 5},
        {"tenant": "t", "sub": "x" * 129},
        {"tenant": "t", "sub": ""},
        {"tenant": "t", "sub": "a\nb"},
        {"tenant": "t", "https://kvfleet/limits": 5},
        {"tenant": "t", "https://kvfleet/limits": {"max_tokens": -1}},
    ],
)
def test_a_token_that_does_not_say_what_it_must(claims: dict[str, Any]) -> None:
    """It is good, but not for this."""
    with pytest.raises(PermissionDenied) as error:
        caller_of({"sub": "me", **claims}, RULES)
    assert error.value.http_status == 403


async def test_beside_api_keys(issuer: LocalIssuer) -> None:
    text = json.dumps(
        {"keys": [{"sha256": hash_key("a.b.c"), "tenant": "keyed"}], "tenants": {"acme": {"max_concurrent": 3}}}
    )
    tenancy = Tenancy(parse_keys(text), time.time, issuer=keys_of(issuer))
    assert not tenancy.has_one_tenant
    assert (await tenancy.authenticate("Bearer a.b.c")).tenant == "keyed"
    assert not issuer.asked, "a known key is asked of nobody"
    caller = await tenancy.authenticate(f"Bearer {good(issuer)}")
    assert (caller.tenant, caller.tenant_limits) == ("acme", KeyLimits(3))
    refused: list[tuple[str | None, str | None]] = [(None, good(issuer)), ("Bearer nothing", None), (None, None)]
    for presented in refused:
        with pytest.raises(KvfleetError) as error:
            await tenancy.authenticate(*presented)
        assert isinstance(error.value, AuthenticationFailed)
