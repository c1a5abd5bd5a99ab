"""What an operator sees of a running fleet: metrics of every process, and one request in everybody's logs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx

from tests.support.up import Up
from tests.support.waiting import LIMIT_S

ROLES = {"i0": "ingress", "p0": "placement", "v0": "vault", "w0": "worker"}


def logged(fleet: Up, request: str) -> set[str]:
    """The services with a line of JSON about the request."""
    found = set()
    for line in list(fleet.stderr_lines):
        if line.startswith("{") and (said := json.loads(line)).get("request") == request:
            assert said["level"] in ("debug", "info")
            assert request in said["message"]
            found.add(said["service"])
    return found


def test_every_process_is_listed_and_each_logs_a_request_by_its_id(tmp_path: Path) -> None:
    flags = ["--port", "0", "--runner", "fake", "--workers", "1", "--log-level", "debug", "--metrics-port-base", "0"]
    fleet = Up(*flags, "--state-dir", str(tmp_path), env={"KVFLEET_LOG_FORMAT": "json"}).wait_ready()
    try:
        listed = json.loads((tmp_path / "targets" / "kvfleet.json").read_text())
        assert {one["labels"]["member"]: one["labels"]["service"] for one in listed} == ROLES
        for one in listed:
            shown = httpx.get(f"http://{one['targets'][0]}/metrics", trust_env=False).text
            assert f'kvfleet_build_info{{role="{one["labels"]["service"]}",version=' in shown
            assert "kvfleet_nats_connections 1.0" in shown
            assert "process_resident_memory_bytes " in shown
        body = {"prompt": "x", "max_tokens": 4, "policy": "cost"}  # by name: a busy placement is waited for
        answer = httpx.post(f"{fleet.base}/generate", json=body, trust_env=False)
        request = answer.headers["x-request-id"]
        end = time.monotonic() + LIMIT_S
        while logged(fleet, request) != {"ingress-i0", "placement-p0", "worker-w0"} and time.monotonic() < end:
            time.sleep(0.05)
        assert logged(fleet, request) == {"ingress-i0", "placement-p0", "worker-w0"}
    finally:
        fleet.stop()
