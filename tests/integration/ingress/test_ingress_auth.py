"""Who may come in, over HTTP: keys that go while requests run, tokens of an issuer, what is open to everybody."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from ingress_rig import Serve, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key, parse_keys
from kvfleet.ingress.auth.jwks import IssuerKeys, fetch_key_set
from kvfleet.ingress.auth.oidc import OidcRules
from kvfleet.ingress.auth.tenancy import Tenancy
from tests.support.local_issuer import AUDIENCE, LocalIssuer, hmac_token, public_jwk, public_pem, token

GENERATE = "/generate"
LONG = [(50 + n, f" word{n}") for n in range(60)]


def text_of(*names: str, **more: Any) -> str:
    return json.dumps([{"name": name, "sha256": hash_key(name), "tenant": name, **more} for name in names])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def issuer() -> Iterator[LocalIssuer]:
    issuer = LocalIssuer()
    yield issuer
    issuer.stop()


def trusting(issuer: LocalIssuer, keys: str = '{"keys": []}') -> Tenancy:
    rules = OidcRules(issuer.url, AUDIENCE, admin_claim="roles")
    of_issuer = IssuerKeys(rules, partial(fetch_key_set, issuer.url, None), time.monotonic)
    return Tenancy(parse_keys(keys), time.time, issuer=of_issuer)


async def test_a_removed_key_is_refused_and_its_stream_goes_on(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=text_of("a", "b"))
    worker.reply, worker.token_s = LONG, 0.01
    body = {"prompt": "x", "max_tokens": 60}
    running = asyncio.create_task(served.http.post(GENERATE, json=body, headers=bearer("a")))
    await until(lambda: worker.generated > 5)
    served.ingress.tenancy.use(parse_keys(text_of("b", "c")))
    for path in (GENERATE, "/v1/chat/completions"):
        assert (await served.http.post(path, json=body, headers=bearer("a"))).status_code == 401
    assert (await served.http.get("/v1/models", headers=bearer("a"))).status_code == 401
    for key in ("b", "c"):
        assert (await served.http.get("/v1/models", headers=bearer(key))).status_code == 200
    assert "word59" in (await running).text
    assert served.ingress.admission.running == 0
    served.ingress.admission.check_integrity()


async def test_what_is_open_and_what_is_an_admins(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=json.dumps([*json.loads(text_of("user")), *json.loads(text_of("boss", admin=True))]))
    for path in ("/stats", "/workers", "/metrics"):
        assert (await served.http.get(path)).status_code == 401
        assert (await served.http.get(path, headers=bearer("user"))).status_code == 403
        assert (await served.http.get(path, headers=bearer("boss"))).status_code == 200
    for path in ("/livez", "/readyz"):
        assert set((await served.http.get(path)).json()) == {"status"}
    anonymous = {"status", "nats", "workers_ready", "placements", "vaults"}
    refused = served.ingress.tenancy.refused_total
    for more, headers in enumerate(({}, bearer("wrong"))):  # a probe without a key is nobody's failed attempt
        assert set((await served.http.get("/health", headers=headers)).json()) == anonymous
        assert served.ingress.tenancy.refused_total == refused + more
    known = (await served.http.get("/health", headers=bearer("user"))).json()
    assert (known["models"], set(known) - anonymous) == (["demo"], {"ingress", "models", "models_unavailable"})


async def test_without_keys_all_is_open(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving()
    for path in ("/stats", "/workers", "/metrics", "/health", "/v1/models"):
        assert (await served.http.get(path)).status_code == 200
    assert "kvfleet_ingress_refused_callers_total 0.0" in (await served.http.get("/metrics")).text
    assert "models" in (await served.http.get("/health")).json()


async def test_tokens_of_an_issuer(serving: Serve, worker: ScriptedWorker, issuer: LocalIssuer) -> None:
    served = await serving(tenancy=trusting(issuer, text_of("keyed")))
    body = {"prompt": "x", "seq_id": "s"}
    good = await served.http.post(GENERATE, json=body, headers=bearer(token(issuer.url)))
    assert good.status_code == 200
    assert worker.requests[-1][0] == "acme", "the tenant that the token says"
    assert (await served.http.post(GENERATE, json=body, headers=bearer("keyed"))).status_code == 200
    assert worker.requests[-1][0] == "keyed"
    other = token(issuer.url, tenant="other")
    assert (await served.http.get("/sessions/s", headers=bearer(other))).status_code == 404
    assert (await served.http.get("/sessions/s", headers=bearer(token(issuer.url)))).status_code == 200
    assert (await served.http.get("/stats", headers=bearer(other))).status_code == 403
    admin = token(issuer.url, roles=["kvfleet-admin"])
    assert (await served.http.get("/stats", headers=bearer(admin))).status_code == 200

    now = int(time.time())
    bad = {
        "expired": token(issuer.url, exp=now - 120),
        "another audience": token(issuer.url, aud="x"),
        "another issuer": token("https://x.example"),
        "HS256 with the public key": hmac_token(issuer.url, public_pem("RS256", "k1"), "k1"),
        "unknown key": token(issuer.url, kid="k2"),
    }
    for what, said in bad.items():
        refused = await served.http.post(GENERATE, json=body, headers=bearer(said))
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), what
        assert refused.json()["error"]["code"] == "authentication_failed"
    for claims in ({"tenant": None}, {"tenant": "a.b"}, {"tenant": ">"}):
        refused = await served.http.post(GENERATE, json=body, headers=bearer(token(issuer.url, **claims)))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert len(worker.requests) == 2


async def test_rotated_keys_and_an_issuer_that_is_away(
    serving: Serve, worker: ScriptedWorker, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serving(tenancy=trusting(issuer))
    assert (await served.http.get("/v1/models", headers=bearer(token(issuer.url)))).status_code == 200
    monkeypatch.setattr("kvfleet.ingress.auth.jwks.COOLDOWN_S", 0.0)
    issuer.keys = [public_jwk("EdDSA", "k2")]
    rotated = bearer(token(issuer.url, algorithm="EdDSA", kid="k2"))
    assert (await served.http.get("/v1/models", headers=rotated)).status_code == 200
    issuer.away = True
    assert (await served.http.get("/v1/models", headers=rotated)).status_code == 200
    nobody_knows = await served.http.get("/v1/models", headers=bearer(token(issuer.url, kid="k3")))
    assert (nobody_knows.status_code, nobody_knows.json()["error"]["code"]) == (503, "unavailable")
    assert nobody_knows.headers["retry-after"]


async def test_a_session_of_a_token_is_limited_as_its_claims_say(
    serving: Serve, worker: ScriptedWorker, issuer: LocalIssuer
) -> None:
    rules = OidcRules(issuer.url, AUDIENCE, limits_claim="limits")
    of_issuer = IssuerKeys(rules, partial(fetch_key_set, issuer.url, None), time.monotonic)
    tenants = json.dumps({"keys": [], "tenants": {"*": {"requests_per_minute": 60}}})
    served = await serving(tenancy=Tenancy(parse_keys(tenants), time.time, issuer=of_issuer))
    said = bearer(token(issuer.url, limits={"tokens_per_minute": 50, "max_tokens": 3}))
    answer = await served.http.post("/v1/completions", json={"model": "demo", "prompt": [5] * 40}, headers=said)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.headers["x-ratelimit-limit-tokens"] == "50"
    assert answer.headers["x-ratelimit-limit-requests"] == "60"
    again = await served.http.post("/v1/completions", json={"model": "demo", "prompt": [5] * 40}, headers=said)
    assert again.status_code == 429
