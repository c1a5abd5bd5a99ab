"""Vaults of `kvfleet up`, as a user meets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.up import Up

KVFLEET = str(Path(sys.executable).with_name("kvfleet"))
FAKE = ("--port", "0", "--runner", "fake", "--workers", "1")


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def vaults_of(fleet: Up) -> list[int]:
    return [pid for pid in fleet.descendants() if b"services.vault.main" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def serves(fleet: Up) -> bool:
    return httpx.post(f"{fleet.base}/generate", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_up_starts_a_vault_and_starts_it_again_and_never_ends_because_of_it() -> None:
    fleet = Up(*FAKE, "--vault-max-bytes", "100000000").wait_ready()
    try:
        (vault,) = vaults_of(fleet)
        assert b"--max-bytes=100000000" in command_of(vault)
        assert httpx.get(f"{fleet.base}/health").json()["vaults"] == 1
        assert httpx.get(f"{fleet.base}/stats").json()["vaults"] == 1
        for _ in range(4):
            (vault,) = vaults_of(fleet)
            os.kill(vault, signal.SIGKILL)
            until(lambda killed=vault: killed not in vaults_of(fleet))  # type: ignore[misc]
            if "given up" not in fleet.stderr:
                until(lambda: vaults_of(fleet) or "v0 ended again and again, given up" in fleet.stderr)
        until(lambda: "v0 ended again and again, given up" in fleet.stderr)
        until(lambda: httpx.get(f"{fleet.base}/health").json()["vaults"] == 0)
        assert serves(fleet)
    finally:
        assert fleet.stop() == 0
    assert "Traceback" not in fleet.stderr, fleet.stderr


def test_two_vaults_or_none() -> None:
    for count in (2, 0):
        fleet = Up(*FAKE, "--vaults", str(count)).wait_ready()
        try:
            assert len(vaults_of(fleet)) == count
            assert httpx.get(f"{fleet.base}/health").json()["vaults"] == count
            assert serves(fleet)
        finally:
            began = time.monotonic()
            assert fleet.stop() == 0
            assert time.monotonic() - began < 10


def test_the_command_says_what_it_takes() -> None:
    done = subprocess.run([KVFLEET, "vault", "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    for flag in ("--max-bytes", "--disk-dir", "--disk-max-bytes", "--data-plane-host", "--data-plane-cert"):
        assert flag in done.stdout
    wrong = subprocess.run(
        [KVFLEET, "vault", "--max-bytes", "much"], capture_output=True, text=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert "--max-bytes" in wrong.stderr


def test_a_dead_nats_is_one_line() -> None:
    done = subprocess.run(
        [KVFLEET, "vault", "--nats-url", "nats://127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("kvfleet vault: ")
    assert "127.0.0.1:1" in line
