"""`kvfleet up --autoscale 0:2` for real: no worker while there is nothing to do; a batch brings one, and is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.up import Up
from tests.support.waiting import LIMIT_S, wait_until

WINDOWS = {"KVFLEET_SCALE_UP_S": "2", "KVFLEET_SCALE_DOWN_S": "3"}


@pytest.fixture
def fleet() -> Iterator[Up]:
    up = Up("--port", "0", "--autoscale", "0:2", "--runner", "fake", "--vaults", "0", env=WINDOWS)
    try:
        yield up.wait_ready()
    finally:
        up.stop()


def begun(http: httpx.Client) -> str:
    said = {"model": "demo", "messages": [{"role": "user", "content": "Who goes there?"}], "max_tokens": 4}
    lines = [{"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": said} for n in range(5)]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    return str(http.post("/v1/batches", json=asked).json()["id"])


def told(http: httpx.Client, batch: str) -> dict[str, Any]:
    return dict(http.get(f"/v1/batches/{batch}").json())


def workers(http: httpx.Client) -> int:
    return sum(one["state"] == "ready" for one in http.get("/workers").json().values())


def completed(http: httpx.Client, fleet: Up) -> None:
    batch = begun(http)
    wait_until(lambda: told(http, batch)["status"] == "completed", told=lambda: f"{told(http, batch)} {fleet.stderr}")
    assert told(http, batch)["request_counts"] == {"total": 5, "completed": 5, "failed": 0}


def test_a_batch_brings_a_worker_and_an_idle_fleet_has_none(fleet: Up) -> None:
    """Nobody has asked for anything for a minute, which is how long a refusal counts; then the last worker goes."""
    with httpx.Client(base_url=fleet.base, timeout=10, trust_env=False) as http:
        assert workers(http) == 0
        completed(http, fleet)
        wait_until(lambda: workers(http) == 0, LIMIT_S * 2, told=lambda: fleet.stderr)
        completed(http, fleet)  # by an ingress that remembers the tokenizer
    assert fleet.stderr.count("kvfleet: starting w") == 2, fleet.stderr
    assert "Traceback" not in fleet.stderr, fleet.stderr
