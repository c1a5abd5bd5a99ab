"""Vaults of `kvfleet up`, as a user meets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.support.up import Up, command_of
from tests.support.waiting import LIMIT_S, wait_until

KVFLEET = str(Path(sys.executable).with_name("kvfleet"))
FAKE = ("--port", "0", "--runner", "fake", "--workers", "1")


def vaults_of(fleet: Up) -> list[int]:
    return [pid for pid in fleet.descendants() if "kvfleet.vault.main" in command_of(pid)]


def serves(fleet: Up) -> bool:
    return httpx.post(f"{fleet.base}/generate", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def vaults_seen(fleet: Up) -> int:
    seen: int = httpx.get(f"{fleet.base}/health").json()["vaults"]
    return seen


def test_up_starts_vaults_and_starts_them_again_and_never_ends_because_of_one() -> None:
    fleet = Up(*FAKE, "--vaults", "2", "--vault-max-bytes", "100000000").wait_ready()
    try:
        first = next(pid for pid in vaults_of(fleet) if "--id=v0" in command_of(pid))
        assert all("--max-bytes=100000000" in command_of(pid) for pid in vaults_of(fleet))
        assert vaults_seen(fleet) == 2, "before the ready line"
        assert httpx.get(f"{fleet.base}/stats").json()["vaults"] == 2
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "v0 ended with code -9; starting it again" in fleet.stderr and len(vaults_of(fleet)) == 2)
        while "v0 ended again and again, given up" not in fleet.stderr:
            for pid in vaults_of(fleet):
                if "--id=v0" in command_of(pid):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        wait_until(lambda: vaults_seen(fleet) == 1)
        assert serves(fleet)
    finally:
        began = time.monotonic()
        assert fleet.stop() == 0
    assert time.monotonic() - began < 10
    assert "Traceback" not in fleet.stderr, fleet.stderr


def test_up_without_a_vault() -> None:
    fleet = Up(*FAKE, "--vaults", "0").wait_ready()
    try:
        assert (vaults_of(fleet), vaults_seen(fleet)) == ([], 0)
        assert serves(fleet)
    finally:
        assert fleet.stop() == 0


def test_the_command_says_what_it_takes() -> None:
    done = subprocess.run([KVFLEET, "vault", "--help"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0
    for flag in ("--max-bytes", "--disk-dir", "--disk-max-bytes", "--data-plane-host", "--data-plane-cert"):
        assert flag in done.stdout
    wrong = subprocess.run(
        [KVFLEET, "vault", "--max-bytes", "much"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert wrong.returncode == 2
    assert "--max-bytes" in wrong.stderr
