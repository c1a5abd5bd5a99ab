"""A response in the background of a real fleet, whose worker and only ingress are killed while it is written."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.test_http import two_ready
from tests.e2e.test_ingress_killed import kill_ingress, wait_served
from tests.support.up import Up
from tests.support.waiting import LIMIT_S

ASKED: dict[str, Any] = {
    "model": "demo", "input": "Who goes there?", "seed": 7, "temperature": 0.9, "max_output_tokens": 700,
    "background": True,
}  # fmt: skip


def made(fleet: Up, http: httpx.Client, *, kills: bool) -> str:
    """Its text."""
    response = http.post("/v1/responses", json=ASKED).json()["id"]
    if kills:
        with http.stream("GET", f"/v1/responses/{response}?stream=true") as events:
            next(line for line in events.iter_lines() if "output_text.delta" in line)
        workers = http.get("/workers").json()
        for worker in workers.values():  # one of them has it; up starts both again
            os.kill(worker["pid"], signal.SIGKILL)
        kill_ingress(fleet)
        wait_served(fleet)
    until = time.monotonic() + LIMIT_S
    while (told := http.get(f"/v1/responses/{response}").json())["status"] == "in_progress":
        assert time.monotonic() < until, told
        time.sleep(0.1)
    assert told["status"] in ("completed", "incomplete"), told
    return str(told["output"][0]["content"][0]["text"])


def test_it_ends_though_its_worker_and_its_ingress_die(tmp_path: Path) -> None:
    fleet = Up("--port", "0", "--workers", "2", "--state-dir", str(tmp_path)).wait_ready()
    try:
        with httpx.Client(base_url=fleet.base, timeout=LIMIT_S, trust_env=False) as http:
            two_ready(http)
            whole = made(fleet, http, kills=False)
            two_ready(http)
            assert made(fleet, http, kills=True) == whole
    finally:
        code = fleet.stop()
    assert code == 0, fleet.stderr
