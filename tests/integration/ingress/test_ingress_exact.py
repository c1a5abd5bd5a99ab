"""`exact` over HTTP: every generating route hands it on, and refuses what is no boolean."""

from __future__ import annotations

from typing import Any

import pytest
from ingress_rig import Served
from scripted_worker import ScriptedWorker

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"model": "demo", "prompt": "x"}),
    ("/generate", {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_it_reaches_the_worker(served: Served, worker: ScriptedWorker, path: str, body: dict[str, Any]) -> None:
    for said in ({}, {"exact": None}, {"exact": False}, {"exact": True}):
        assert (await served.http.post(path, json={**body, **said})).status_code == 200
    assert [request.exact for _, request in worker.requests] == [False, False, False, True]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_what_is_no_boolean_is_refused_by_name(
    served: Served, worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    for said in (1, "true", [], {}):
        refused = await served.http.post(path, json={**body, "exact": said})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "exact"
    assert not worker.requests
