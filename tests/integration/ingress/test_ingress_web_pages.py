"""What pages of other sites may have of an ingress without keys: nothing. What curl, SDKs and its own page may: all."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from ingress_rig import Serve, Served
from scripted_worker import ScriptedWorker
from test_ingress_limits_http import keys_of

from kvfleet.ingress.http.web_guard import name_of
from kvfleet.ingress.settings import WebRules

ASK = json.dumps({"prompt": "x", "max_tokens": 2})
FORM = "application/x-www-form-urlencoded"  # what curl says of -d
EVIL, CHAT = "https://evil.example", "https://chat.example"


async def generate(served: Served, **headers: str) -> httpx.Response:
    said = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return await served.http.post("/generate", content=ASK, headers=said)


def refused(answer: httpx.Response, status: int, field: str) -> bool:
    error = answer.json()["error"]
    return (answer.status_code, error["param"]) == (status, field) and len(error["message"]) > 30


async def test_curl_and_sdks_say_nothing_of_a_page(served: Served, worker: ScriptedWorker) -> None:
    for kind in (FORM, "application/json", "text/plain"):
        assert (await generate(served, content_type=kind)).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "a.localhost:1", "[::1]:8080", "10.1.2.3:8080", "box"])
async def test_hosts_that_cannot_be_rebound(serving: Serve, worker: ScriptedWorker, host: str) -> None:
    served = await serving(web=WebRules(own_hosts=("0.0.0.0", "Box")))
    assert (await served.http.get("/v1/models", headers={"host": host})).status_code == 200
    assert (await served.http.get("/v1/models", headers={"host": host, "origin": f"http://{host}"})).status_code == 200


async def test_dns_rebinding(serving: Serve, worker: ScriptedWorker) -> None:
    """The page's own name, which it made point here: all is of the same origin then."""
    served = await serving()
    rebound = {"host": "evil.example:8080", "origin": "http://evil.example:8080", "sec-fetch-site": "same-origin"}
    for path in ("/v1/models", "/stats", "/workers", "/sessions/s", "/v1/placements", "/metrics", "/health"):
        answer = await served.http.get(path, headers=rebound)
        assert refused(answer, 421, "host"), path
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    answer = await served.http.post("/generate", content=ASK, headers=rebound | {"content-type": "application/json"})
    assert refused(answer, 421, "host")
    for path in ("/livez", "/readyz", "/openapi.json", "/", "/dashboard/dashboard.js"):  # these hold nothing
        assert (await served.http.get(path, headers=rebound)).status_code in (200, 404)
    assert not worker.requests
    for rules in (WebRules(allowed_hosts=("EVIL.example",)), WebRules(allowed_hosts=("*",))):
        other = await serving(web=rules)
        assert (await other.http.get("/v1/models", headers=rebound)).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", FORM, "multipart/form-data; boundary=x", "application/json"])
async def test_another_sites_page_spends_nothing(served: Served, worker: ScriptedWorker, kind: str) -> None:
    assert refused(await generate(served, content_type=kind, origin=EVIL), 403, "origin")
    assert refused(await generate(served, content_type=kind, origin="null", sec_fetch_site="cross-site"), 403, "origin")
    for site in ("cross-site", "same-site"):
        assert refused(await generate(served, content_type=kind, sec_fetch_site=site), 403, "sec-fetch-site")
    picture = await served.http.get("/sessions/s", headers={"sec-fetch-site": "cross-site"})
    assert refused(picture, 403, "sec-fetch-site")
    assert not worker.requests


async def test_its_own_page(served: Served, worker: ScriptedWorker) -> None:
    own = {"origin": served.url, "sec_fetch_site": "same-origin"}
    assert (await generate(served, **own)).status_code == 200
    assert refused(await generate(served, content_type="text/plain", **own), 403, "content-type")
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await served.http.get("/", headers=linked)).status_code == 200


async def test_pages_that_may(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(web=WebRules(cors_origins=(CHAT,)))
    preflight = {"origin": CHAT, "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    allowed = await served.http.options("/generate", headers=preflight)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, CHAT)
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    answer = await generate(served, origin=CHAT, sec_fetch_site="cross-site")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, CHAT)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert (await served.http.options("/generate", headers=preflight | {"origin": EVIL})).status_code == 400
    assert refused(await generate(served, origin=EVIL, sec_fetch_site="cross-site"), 403, "origin")


async def test_with_keys_a_page_has_nothing_to_send(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={}))
    far: dict[str, Any] = {"host": "kvfleet.example", "origin": EVIL, "sec_fetch_site": "cross-site"}
    assert (await generate(served, **far)).status_code == 401
    assert (await generate(served, x_api_key="a", **far)).status_code == 200
    named = await serving(keys=keys_of(a={}), web=WebRules(allowed_hosts=("other.example",)))
    assert refused(await generate(named, x_api_key="a", **far), 421, "host")


def test_names_of_hosts() -> None:
    for host, name in {
        "a.b:80": "a.b",
        "[::1]:8": "::1",
        "[::1]": "::1",
        "a.b.": "a.b",
        "a": "a",
        "a:b": "a:b",
    }.items():
        assert name_of(host) == name
