"""`kill -9` of an embedded fleet's only ingress: clients that connect meanwhile wait for the next, none is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from openai import OpenAI

from tests.support.up import Up, command_of
from tests.support.waiting import LIMIT_S, wait_until

CLIENTS = 6
KILLS = 2


def ingress_of(fleet: Up) -> int | None:
    return next((pid for pid in fleet.descendants() if "kvfleet.ingress.main" in command_of(pid)), None)


def kill_ingress(fleet: Up) -> None:
    pid = ingress_of(fleet)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def wait_served(fleet: Up) -> None:
    """No connection is refused meanwhile."""
    with httpx.Client(base_url=fleet.base, timeout=LIMIT_S, trust_env=False) as http:
        wait_until(lambda: http.get("/readyz").status_code == 200)


def test_every_request_of_a_client_with_its_usual_retries_is_answered(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path), "--metrics-port-base", "0")
    fleet = Up("--port", "0", "--runner", "fake", *state).wait_ready()
    enough = threading.Event()

    def ask_on(number: int) -> int:
        answered = 0
        with OpenAI(base_url=f"{fleet.base}/v1", api_key="none") as client:  # retries twice, within 1.5 s or so
            while not enough.is_set():
                said = client.completions.create(
                    model="demo", prompt=f"{number} of {answered}", max_tokens=2, extra_body={"ignore_eos": True}
                )
                assert said.usage is not None
                assert said.usage.completion_tokens == 2
                answered += 1
        return answered

    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask_on, number) for number in range(CLIENTS)]
            try:
                for _ in range(KILLS):
                    kill_ingress(fleet)
                    wait_served(fleet)
                    raised = [error for one in asking if one.done() and (error := one.exception())]
                    assert raised == []
            finally:
                enough.set()
            assert all(one.result() > 0 for one in asking)
        targets = json.loads((tmp_path / "targets" / "kvfleet.json").read_text())
        front = next(one["targets"][0] for one in targets if one["labels"]["service"] == "ingress")
        assert "kvfleet_ingress_" in httpx.get(f"http://{front}/metrics", trust_env=False).text, "it has its port again"
    finally:
        code = fleet.stop()
    assert code == 0, fleet.stderr


def test_a_connection_from_before_the_next_ingress_is_served_by_it() -> None:
    fleet = Up("--port", "0", "--runner", "fake", "--workers", "1").wait_ready()
    try:
        killed = ingress_of(fleet)
        kill_ingress(fleet)
        host, port = fleet.base.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as early:
            wait_until(lambda: ingress_of(fleet) not in (killed, None))
            early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert early.recv(100).startswith(b"HTTP/1.1 ")
    finally:
        assert fleet.stop() == 0


def test_a_fleet_that_ends_refuses_at_once() -> None:
    fleet = Up("--port", "0", "--runner", "fake", "--workers", "1").wait_ready()
    host, port = fleet.base.removeprefix("http://").split(":")
    assert fleet.stop() == 0
    with socket.socket() as late:
        late.settimeout(LIMIT_S)
        assert late.connect_ex((host, int(port))) != 0
