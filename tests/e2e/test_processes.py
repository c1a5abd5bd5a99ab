"""Starting and stopping: one clear line for what cannot work, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.support.up import Up, alive

KVFLEET = str(Path(sys.executable).with_name("kvfleet"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KVFLEET, *arguments], capture_output=True, text=True, timeout=60, check=False)


def gone(pids: list[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_state(number: int, tmp_path: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("kvfleet-*"))
    fleet = Up("--port", "0", "--runner", "fake", "--fake-tokens-per-s", "100").wait_ready()
    pids = fleet.descendants()
    assert len(pids) >= 5, "nats-server, placement, two workers, ingress"
    with httpx.stream("POST", f"{fleet.base}/generate", json={"prompt": "x", "max_tokens": 500}) as response:
        next(response.iter_lines())
        began = time.monotonic()
        code = fleet.stop(number)
    assert code == 0, fleet.stderr
    assert time.monotonic() - began < 10
    assert gone(pids, 1.0)
    assert set(Path(tempfile.gettempdir()).glob("kvfleet-*")) <= before
    assert "Traceback" not in fleet.stderr, fleet.stderr


def test_killed_outright_it_takes_its_children_along() -> None:
    fleet = Up("--port", "0", "--runner", "fake").wait_ready()
    pids = fleet.descendants()
    fleet.process.kill()
    fleet.process.wait()
    assert gone(pids, 10.0)


def test_state_outlives_a_restart_where_it_is_kept(tmp_path: Path) -> None:
    flags = ("--port", "0", "--runner", "fake", "--workers", "1", "--state-dir", str(tmp_path / "state"))
    fleet = Up(*flags).wait_ready()
    body = {"prompt": "remember", "max_tokens": 5, "seq_id": "s1"}
    assert httpx.post(f"{fleet.base}/generate", json=body).status_code == 200
    tokens = httpx.get(f"{fleet.base}/sessions/s1").json()["tokens"]
    assert fleet.stop() == 0
    fleet = Up(*flags).wait_ready()
    try:
        assert httpx.get(f"{fleet.base}/sessions/s1").json()["tokens"] == tokens
    finally:
        assert fleet.stop() == 0


def test_two_models_in_one_fleet() -> None:
    flags = ("--model", "demo", "--model", "demo", "--served-model-name", "one", "--served-model-name", "other.name")
    fleet = Up("--port", "0", "--runner", "fake", "--workers", "1", *flags).wait_ready()
    try:
        listed = httpx.get(f"{fleet.base}/v1/models").json()["data"]
        assert sorted(model["id"] for model in listed) == ["one", "other.name"]
        for name in ("one", "other.name"):
            reply = httpx.post(f"{fleet.base}/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 3})
            assert reply.status_code == 200, reply.text
    finally:
        assert fleet.stop() == 0


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("up", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.strip() == f"kvfleet: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_missing_model_folder_is_one_line(tmp_path: Path) -> None:
    done = run("up", "--model", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert done.stderr.strip() == f"kvfleet: model folder '{tmp_path / 'absent'}' does not exist"


def test_a_model_that_cannot_load_says_which_process_and_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run("up", "--model", str(tmp_path), "--port", "0", "--workers", "1")
    assert done.returncode == 1
    assert "w0 could not start" in done.stderr
    assert "tokenizer" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["up", "worker", "ingress", "placement"])
def test_a_dead_nats_is_one_line(command: str) -> None:
    flags = ["--port", "0"] if command in ("up", "ingress") else []
    done = run(command, "--nats-url", "nats://127.0.0.1:1", *flags)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvfleet")]
    assert len(lines) == 1, done.stderr
    assert "127.0.0.1:1" in lines[0]
    assert "Traceback" not in done.stderr


def test_wrong_settings_name_the_flag() -> None:
    done = run("worker", "--slots", "0")
    assert done.returncode == 2
    assert "--slots" in done.stderr
    assert os.environ.get("KVFLEET_SLOTS") is None
