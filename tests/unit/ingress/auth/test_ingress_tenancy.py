"""API keys: what a configuration says, and who presents one of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfleet.ingress.auth.api_keys import ApiKey, KeySet, hash_key, parse_keys
from kvfleet.ingress.auth.tenancy import MAX_PRESENTED_CHARS, Tenancy
from kvfleet.ingress.limits.callers import NO_LIMITS, OPEN, Caller, KeyLimits, default_max_tokens, require_admin
from kvproto.errors import AuthenticationFailed, InvalidRequest, PermissionDenied

HASH, OTHER = hash_key("secret"), hash_key("other")


def tenancy_of(*entries: dict[str, Any], now: float = 0.0, **more: Any) -> Tenancy:
    return Tenancy(parse_keys(json.dumps({"keys": entries, **more})), lambda: now)


def test_keys_from_toml_and_json_are_equal() -> None:
    toml = f'[[keys]]\nname = "a"\nsha256 = "{HASH}"\ntenant = "t"\nadmin = true\nmax_concurrent = 3\n'
    entry = {"name": "a", "sha256": HASH, "tenant": "t", "admin": True, "max_concurrent": 3}
    expected = (ApiKey((HASH,), Caller("a", "t", True, KeyLimits(3))),)
    for text in (toml, json.dumps([entry]), json.dumps({"keys": [entry]})):
        assert parse_keys(text).keys == expected
    assert parse_keys('{"keys": []}') == KeySet()


def test_an_empty_text_is_not_the_same_as_no_keys() -> None:
    """A file that is being written is empty for a moment."""
    for text in ("", "  \n", "{}"):
        with pytest.raises(InvalidRequest):
            parse_keys(text)


def test_several_sources_are_one() -> None:
    one, two = ([{"name": name, "sha256": hash_key(name)}] for name in "ab")
    read = parse_keys(json.dumps(one), json.dumps({"keys": two, "tenants": {"public": {"max_concurrent": 5}}}))
    assert [key.caller.name for key in read.keys] == ["a", "b"]
    assert {key.caller.tenant_limits for key in read.keys} == {KeyLimits(5)}
    with pytest.raises(InvalidRequest, match="same"):
        parse_keys(json.dumps(one), json.dumps(one))


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        ("not toml", "api_keys"),
        ("5", "api_keys"),
        ("[5]", "api_keys[0]"),
        ('{"keys": [], "other": 1}', "api_keys: other"),
        ('[{"name": "a"}]', "api_keys[0].sha256"),
        ('[{"sha256": "secret"}]', "api_keys[0].sha256"),
        ('[{"sha256": []}]', "api_keys[0].sha256"),
        (f'[{{"sha256": ["{HASH}", "secret"]}}]', "api_keys[0].sha256"),
        (f'[{{"sha256": "{HASH}", "name": "a\\nb"}}]', "api_keys[0].name"),
        (f'[{{"sha256": "{HASH}", "name": "oidc:me"}}]', "api_keys[0].name"),
        (f'[{{"sha256": "{HASH}", "tenant": "a.b"}}]', "api_keys[0].tenant"),
        (f'[{{"sha256": "{HASH}", "admin": 1}}]', "api_keys[0].admin"),
        (f'[{{"sha256": "{HASH}", "disabled": "no"}}]', "api_keys[0].disabled"),
        (f'[{{"sha256": "{HASH}", "not_after": "2027-01-01T00:00:00"}}]', "api_keys[0].not_after"),
        (f'[{{"sha256": "{HASH}", "not_after": "soon"}}]', "api_keys[0].not_after"),
        (f'[{{"sha256": "{HASH}", "not_after": 5}}]', "api_keys[0].not_after"),
        (f'[[keys]]\nsha256 = "{HASH}"\nnot_after = 2027-01-01', "api_keys[0].not_after"),
        (f'[{{"sha256": "{HASH}", "max_concurrent": -1}}]', "api_keys[0].max_concurrent"),
        (f'[{{"sha256": "{HASH}", "max_tokens": 1.5}}]', "api_keys[0].max_tokens"),
        (f'[{{"sha256": "{HASH}", "tokens_per_minute": NaN}}]', "api_keys[0].tokens_per_minute"),
        (f'[{{"sha256": "{HASH}", "tokens_per_minute": true}}]', "api_keys[0].tokens_per_minute"),
        (f'[{{"sha256": "{HASH}", "key": "x"}}]', "api_keys[0].key"),
        (f'[{{"sha256": "{HASH}"}}, {{"name": "b", "sha256": "{HASH}"}}]', "api_keys"),
        (f'[{{"sha256": "{HASH}", "name": "b"}}, {{"name": "b", "sha256": "{OTHER}"}}]', "api_keys"),
        ('{"tenants": 5}', "tenants"),
        ('{"tenants": {"a": 5}}', "tenants.a"),
        ('{"tenants": {"a.b": {}}}', "tenants[0]"),
        ('{"tenants": {"a": {"max_concurrent": -1}}}', "tenants.a.max_concurrent"),
        ('{"tenants": {"a": {"admin": true}}}', "tenants.a.admin"),
    ],
)
def test_a_bad_key_file_names_the_entry(entries: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_keys(entries)
    assert error.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        "Sk-LIVE_0123456789",
        'Sk-LIVE_0123456789 = "x',
        '[[keys]]\nsha256 = "Sk-LIVE_0123456789"',
        '["Sk-LIVE_0123456789"]',
        f'[{{"sha256": "{HASH}", "Sk-LIVE_0123456789": 1}}]',
        f'[{{"sha256": "{HASH}", "tenant": "Sk-LIVE.0123456789"}}]',
        f'[{{"sha256": "{HASH}", "not_after": "Sk-LIVE_0123456789"}}]',
        '{"Sk-LIVE_0123456789": [], "keys": []}',
        '{"tenants": {"Sk-LIVE.0123456789": {}}}',
    ],
)
def test_a_key_in_the_wrong_place_is_not_repeated(text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_keys(text)
    assert "LIVE" not in str(error.value)
    assert error.value.__cause__ is None


async def test_authentication() -> None:
    tenancy = tenancy_of({"sha256": HASH, "tenant": "t"})
    for presented in (("Bearer secret",), ("bearer  secret ",), (None, "secret"), ("Basic x", "secret")):
        assert (await tenancy.authenticate(*presented)).tenant == "t"
    for authorization, api_key in (
        (None, None),
        ("Bearer wrong", None),
        ("Bearer ", None),
        ("Bearer wrong", "secret"),
        (f"Bearer {HASH}", None),
        ("Bearer a.b.c", None),
        ("Bearer \xff\udcff", None),
        ("Bearer " + "x" * (MAX_PRESENTED_CHARS + 1), None),
    ):
        with pytest.raises(AuthenticationFailed):
            await tenancy.authenticate(authorization, api_key)
    assert tenancy.refused_total == 8
    with pytest.raises(PermissionDenied):
        require_admin(await tenancy.authenticate("Bearer secret"))


async def test_old_and_new_key_at_once() -> None:
    tenancy = tenancy_of({"name": "a", "sha256": [HASH, OTHER]})
    assert await tenancy.authenticate("Bearer secret") is await tenancy.authenticate("Bearer other")


async def test_keys_that_are_no_longer_good() -> None:
    entries = (
        {"name": "a", "sha256": HASH, "not_after": "1970-01-01T01:01:40+01:00"},
        {"name": "b", "sha256": OTHER, "disabled": True},
    )
    assert await tenancy_of(*entries, now=99.9).authenticate("Bearer secret")
    with pytest.raises(AuthenticationFailed, match="expired"):
        await tenancy_of(*entries, now=100.0).authenticate("Bearer secret")
    with pytest.raises(AuthenticationFailed, match="disabled"):
        await tenancy_of(*entries).authenticate("Bearer other")
    toml = f'[[keys]]\nsha256 = "{HASH}"\nnot_after = 1970-01-01T00:01:40Z\n'
    assert parse_keys(toml).keys[0].not_after == 100.0


async def test_without_keys_everybody_is_public() -> None:
    tenancy = Tenancy(KeySet(), lambda: 0.0)
    assert await tenancy.authenticate(None) is OPEN
    assert OPEN.tenant == "public"
    require_admin(OPEN)
    assert tenancy.has_one_tenant


async def test_keys_are_replaced_and_an_ingress_never_becomes_open() -> None:
    tenancy = tenancy_of({"sha256": HASH})
    tenancy.use(parse_keys(json.dumps([{"sha256": OTHER}])))
    assert await tenancy.authenticate("Bearer other")
    tenancy.use(parse_keys('{"keys": []}'))
    for presented in ("Bearer secret", "Bearer other", None):
        with pytest.raises(AuthenticationFailed):
            await tenancy.authenticate(presented)


def test_whether_all_callers_are_of_one_tenant() -> None:
    """Else request ids of Idempotency-Keys need a secret."""
    one, two = {"sha256": HASH, "tenant": "t"}, {"sha256": OTHER, "tenant": "u"}
    assert tenancy_of(one).has_one_tenant
    assert not tenancy_of(one, two).has_one_tenant
    assert not Tenancy(parse_keys(json.dumps([one])), lambda: 0.0, reloads=True).has_one_tenant


def test_limits_of_tenants() -> None:
    read = parse_keys(
        json.dumps(
            {
                "keys": [{"sha256": HASH, "tenant": "t", "max_tokens": 9}, {"sha256": OTHER, "tenant": "u"}],
                "tenants": {"t": {"max_tokens": 5, "tokens_per_day": 7}, "*": {"requests_per_minute": 2.5}},
            }
        )
    )
    first, second = (key.caller for key in read.keys)
    assert (first.limits, first.tenant_limits) == (KeyLimits(max_tokens=9), KeyLimits(max_tokens=5, tokens_per_day=7))
    assert (second.limits, second.tenant_limits) == (NO_LIMITS, KeyLimits(requests_per_minute=2.5))
    assert (first.max_tokens, second.max_tokens) == (5, 0)


def test_the_longest_answer_of_a_caller() -> None:
    free, bound = Caller("a"), Caller("b", limits=KeyLimits(max_tokens=10))
    assert default_max_tokens(free, 5000, "max_tokens", 1024) == 1024
    assert default_max_tokens(bound, None, "max_tokens", 1024) == 10
    assert default_max_tokens(bound, 10, "max_tokens", 1024) == 10
    with pytest.raises(InvalidRequest) as error:
        default_max_tokens(bound, 11, "max_completion_tokens", 1024)
    assert error.value.field == "max_completion_tokens"
    assert "10 at most" in error.value.message
