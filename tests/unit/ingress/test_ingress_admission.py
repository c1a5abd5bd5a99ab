"""Keys, tenants and who may start."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.errors import AuthenticationFailed, Draining, InvalidRequest, LimitExceeded, PermissionDenied, Unavailable
from services.ingress.admission import Admission
from services.ingress.error_bodies import error_body, error_headers, status_of
from services.ingress.tenancy import OPEN, ApiKey, Tenancy, hash_key, parse_keys, require_admin

HASH = hash_key("secret")


def test_keys_from_toml_and_json_are_equal() -> None:
    toml = f'[[keys]]\nname = "a"\nsha256 = "{HASH}"\ntenant = "t"\nadmin = true\nmax_concurrent = 3\n'
    entry = {"name": "a", "sha256": HASH, "tenant": "t", "admin": True, "max_concurrent": 3}
    expected = (ApiKey("a", HASH, "t", True, 3),)
    assert parse_keys(toml) == parse_keys(json.dumps([entry])) == parse_keys(json.dumps({"keys": [entry]})) == expected
    assert parse_keys("  \n") == ()


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        ("not toml", "api_keys"),
        ("5", "api_keys"),
        ("[5]", "api_keys[0]"),
        ('[{"name": "a"}]', "api_keys[0].sha256"),
        ('[{"sha256": "secret"}]', "api_keys[0].sha256"),
        (f'[{{"sha256": "{HASH}", "tenant": "a.b"}}]', "api_keys[0].tenant"),
        (f'[{{"sha256": "{HASH}", "admin": 1}}]', "api_keys[0].admin"),
        (f'[{{"sha256": "{HASH}", "max_concurrent": -1}}]', "api_keys[0].max_concurrent"),
        (f'[{{"sha256": "{HASH}", "key": "x"}}]', "api_keys[0].key"),
        (f'[{{"sha256": "{HASH}"}}, {{"name": "b", "sha256": "{HASH}"}}]', "api_keys"),
    ],
)
def test_a_bad_key_file_names_the_entry(entries: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_keys(entries)
    assert error.value.field == field


def test_authentication() -> None:
    tenancy = Tenancy([ApiKey("a", HASH, "t")])
    assert tenancy.authenticate("Bearer secret").tenant == "t"
    assert tenancy.authenticate("bearer  secret ").tenant == "t"
    assert tenancy.authenticate(None, "secret").tenant == "t"
    for authorization, api_key in ((None, None), ("Bearer wrong", None), ("Bearer ", None), (f"Bearer {HASH}", None)):
        with pytest.raises(AuthenticationFailed):
            tenancy.authenticate(authorization, api_key)
    with pytest.raises(PermissionDenied):
        require_admin(tenancy.authenticate("Bearer secret"))


def test_without_keys_everybody_is_public() -> None:
    assert Tenancy().authenticate(None) is OPEN
    assert OPEN.tenant == "public"
    require_admin(OPEN)


def test_limits_of_the_process_and_of_a_key() -> None:
    admission = Admission(max_concurrent=3)
    one, two = ApiKey("one", "1" * 64, max_concurrent=2), ApiKey("two", "2" * 64)
    admission.admit(one, 0.0)
    admission.admit(one, 0.0)
    with pytest.raises(LimitExceeded):
        admission.admit(one, 0.0)
    admission.admit(two, 0.0)
    with pytest.raises(Unavailable):
        admission.admit(two, 0.0)
    admission.release(one)
    admission.admit(one, 0.0)
    admission.draining = True
    with pytest.raises(Draining):
        admission.admit(two, 0.0)
    assert admission.refused_total == 3
    admission.check_integrity()


def test_a_rate_says_when_to_come_back() -> None:
    admission = Admission(max_concurrent=100)
    key = ApiKey("k", "0" * 64, requests_per_minute=60)
    for _ in range(10):  # the burst
        admission.admit(key, 5.0)
    with pytest.raises(LimitExceeded) as error:
        admission.admit(key, 5.25)
    assert error.value.retry_after_s == pytest.approx(0.75)
    admission.admit(key, 5.25 + 0.76)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 5)), max_size=60))
def test_counts_add_up_whatever_happens(steps: list[tuple[str, bool, float]]) -> None:
    admission = Admission(max_concurrent=5)
    keys = {name: ApiKey(name, name * 64, max_concurrent=3, requests_per_minute=120) for name in "abc"}
    running: list[str] = []
    now = 0.0
    for name, leaves, passed in steps:
        now += passed
        if leaves and name in running:
            running.remove(name)
            admission.release(keys[name])
        elif not leaves:
            try:
                admission.admit(keys[name], now)
                running.append(name)
            except (LimitExceeded, Unavailable):
                pass
        admission.check_integrity()
        assert admission.running == len(running) <= 5
        assert all(running.count(one) <= 3 for one in "abc")


def test_errors_as_clients_read_them() -> None:
    error = LimitExceeded("too many", retry_after_s=1.2)
    assert error_headers(error) == [(b"retry-after", b"2"), (b"x-should-retry", b"true")]
    assert json.loads(error_body(InvalidRequest("must be 5", field="n"))) == {
        "error": {"message": "n: must be 5", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}
    }
    from kvproto.errors import Cancelled

    assert status_of(Cancelled("closing")) == 503
