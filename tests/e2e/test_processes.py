"""Starting and stopping: one clear line for what cannot work, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support import sse
from tests.support.up import Up, alive, command_of
from tests.support.waiting import LIMIT_S, wait_until

KVFLEET = str(Path(sys.executable).with_name("kvfleet"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KVFLEET, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def gone(pids: list[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_state(number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary = tmp_path_factory.mktemp("t")
    flags = ("--port", "0", "--runner", "fake", "--fake-tokens-per-s", "100")
    fleet = Up(*flags, env={"TMPDIR": str(temporary)}).wait_ready()
    pids = fleet.descendants()
    assert len(pids) >= 5, "nats-server, placement, two workers, ingress"
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}
    with httpx.stream("POST", f"{fleet.base}/generate", json=body, timeout=LIMIT_S) as response:
        began = time.monotonic()
        fleet.process.send_signal(number)
        lines = [line for line in sse.lines(response) if line.startswith("data: ")]
        code = fleet.stop(number)
    last = json.loads(lines[-1][6:])
    assert last["type"] in ("done", "error"), "a stream that is cut says so"
    assert code == 0, fleet.stderr
    assert time.monotonic() - began < 10
    assert gone(pids, 1.0)
    assert list(temporary.iterdir()) == []
    assert "Traceback" not in fleet.stderr, fleet.stderr


def test_killed_outright_it_takes_its_children_along() -> None:
    fleet = Up("--port", "0", "--runner", "fake").wait_ready()
    pids = fleet.descendants()
    fleet.process.kill()
    fleet.process.wait()
    assert gone(pids, 10.0)


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_without_the_process_that_all_are_forked_from_it_begins_anew() -> None:
    fleet = Up("--port", "0", "--runner", "fake").wait_ready()
    try:
        before = set(fleet.descendants())
        (server,) = (pid for pid in before if "kvfleet.cli.embedded.forks" in command_of(pid))
        os.kill(server, signal.SIGKILL)
        forked = [pid for pid in before if "nats-server" not in command_of(pid)]
        # Its children die a moment later, and a request that the old ingress took dies with it.
        wait_until(lambda: not any(alive(pid) for pid in forked))
        body = {"prompt": "x", "max_tokens": 2}
        # The socket is held: until there are workers the new ingress says 503.
        wait_until(lambda: httpx.post(f"{fleet.base}/generate", json=body, timeout=LIMIT_S).status_code == 200)
        wait_until(lambda: httpx.get(f"{fleet.base}/health").json().get("workers_ready", 0) == 2)
        both = before & set(fleet.descendants())
        assert ["nats-server" in command_of(pid) for pid in both] == [True], "nothing of before goes on but NATS"
    finally:
        assert fleet.stop() == 0


def test_whatever_was_killed_leaves_no_folder_behind(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary = tmp_path_factory.mktemp("t")  # a short path: there are sockets two folders below it
    env = {"TMPDIR": str(temporary)}
    fleet = Up("--port", "0", "--runner", "fake", "--state-dir", str(tmp_path / "state"), env=env).wait_ready()
    for service in ("worker", "vault"):
        victims = [pid for pid in fleet.descendants() if f"kvfleet.{service}.main" in command_of(pid)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while httpx.get(f"{fleet.base}/health").json().get("workers_ready", 0) < 2 or len(fleet.descendants()) < 6:
        assert time.monotonic() < deadline, fleet.stderr
        time.sleep(0.1)
    assert len(list(temporary.iterdir())) == 1, "all of them have their place in one folder"
    pids = fleet.descendants()
    fleet.process.kill()
    fleet.process.wait()
    assert gone(pids, 10.0)
    fleet = Up("--port", "0", "--runner", "fake", env=env).wait_ready()
    assert len(list(temporary.iterdir())) == 1, "it removed the one that was left"
    assert fleet.stop() == 0
    assert list(temporary.iterdir()) == []


def test_an_empty_fleet_key_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "fleet.key").touch()
    done = run("up", "--port", "0", "--runner", "fake", "--state-dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip() == f"kvfleet: state_dir: {tmp_path / 'fleet.key'} is empty"


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


def test_a_killed_nats_server_is_a_pause_for_running_streams() -> None:
    """As a newcomer would try it: `kill -9` of the embedded server; `up` starts it again where it was."""
    fleet = Up("--port", "0", "--runner", "fake", "--fake-tokens-per-s", "100").wait_ready()
    try:
        nats = next(pid for pid in fleet.descendants() if "nats-server" in command_of(pid))
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        events = []
        with httpx.stream("POST", f"{fleet.base}/generate", json=body, timeout=LIMIT_S) as response:
            for line in sse.lines(response):
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                    if len(events) == 100:
                        os.kill(nats, signal.SIGKILL)
        assert [event["type"] for event in events] == ["start", *["token"] * 400, "done"]
        again = httpx.post(f"{fleet.base}/generate", json={**body, "max_tokens": 3}, timeout=LIMIT_S)
        assert again.status_code == 200
        wait_until(lambda: "nats-server ended with code -9; starting it again" in fleet.stderr)
    finally:
        assert fleet.stop() == 0


def test_two_fleets_stay_apart() -> None:
    """Should one fleet's server ever answer on the other's port, it refuses that fleet's processes."""
    first = Up("--port", "0", "--runner", "fake", "--workers", "1").wait_ready()
    second = Up("--port", "0", "--runner", "fake", "--workers", "1").wait_ready()
    try:
        assert first.nats_url != second.nats_url
        server = next(command for pid in first.descendants() if "nats-server" in (command := command_of(pid)))
        config = Path(server.split("\0-c\0")[1].split("\0")[0]).read_text()
        password = re.search(r'user: fleet, password: "([^"]+)"', config)
        assert password is not None
        login = ["--nats-user=fleet", f"--nats-password={password[1]}"]  # one may begin with a dash
        refused = run("worker", "--nats-url", second.nats_url, *login)
        assert refused.returncode == 1
        assert "refuses user fleet" in refused.stderr
    finally:
        assert first.stop() == second.stop() == 0


def test_a_fleet_with_api_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"sk-1").hexdigest()
    keys.write_text(f'[[keys]]\nname = "one"\nsha256 = "{digest}"\ntenant = "search"\nadmin = true\n')
    fleet = Up("--port", "0", "--runner", "fake", "--workers", "1", "--api-keys-file", str(keys)).wait_ready()
    try:
        body = {"prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{fleet.base}/generate", json=body).status_code == 401
        auth = {"Authorization": "Bearer sk-1"}
        assert httpx.post(f"{fleet.base}/generate", json=body, headers=auth).status_code == 200
    finally:
        assert fleet.stop() == 0


def test_a_dead_nats_is_one_line() -> None:
    def started(command: str) -> subprocess.CompletedProcess[str]:
        flags = ["--port", "0"] if command in ("up", "ingress") else []
        return run(command, "--nats-url", "nats://127.0.0.1:1", *flags)

    with ThreadPoolExecutor() as at_once:
        for done in at_once.map(started, ("up", "worker", "ingress", "placement")):
            assert done.returncode == 1
            (line,) = done.stderr.strip().splitlines()
            assert line.startswith("kvfleet")
            assert "127.0.0.1:1" in line


def test_wrong_settings_name_the_flag() -> None:
    done = run("worker", "--slots", "0")
    assert done.returncode == 2
    assert "--slots" in done.stderr
    assert os.environ.get("KVFLEET_SLOTS") is None
