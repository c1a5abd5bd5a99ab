"""`kvfleet scale w N` against a real `kvfleet up`: workers come and go, and no stream breaks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.test_autoscale import Stream, ready, until
from tests.support.processes import KVFLEET
from tests.support.up import Up
from tests.support.waiting import LIMIT_S

LONG = 1200  # tokens: longer than all of this takes
FAKE = ("--port", "0", "--runner", "fake", "--fake-tokens-per-s", "120", "--vaults", "0")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Up]:
    up = Up(*FAKE, "--workers", "1")
    try:
        yield up.wait_ready()
    finally:
        up.stop()


def scale(fleet: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KVFLEET_NATS_URL": fleet.nats_url}
    return subprocess.run([KVFLEET, "scale", *arguments], env=env, capture_output=True, text=True, timeout=LIMIT_S)


def test_it_grows_at_once_and_shrinks_under_streams_that_go_on(fleet: Up) -> None:
    grown = scale(fleet, "w", "3", "--wait", "60")
    assert grown.returncode == 0, grown.stderr + fleet.stderr
    assert "1 workers, 3 asked for" in grown.stdout
    assert ready(fleet) == {"w0", "w1", "w2"}
    streams: list[Stream] = []
    while len({one.worker for one in streams}) < 3:  # the ring decides as long as nothing is measured
        assert len(streams) < 24, fleet.stderr
        streams.append(Stream(fleet.base, f"a long way {len(streams)}", LONG))
        until(lambda: streams[-1].worker, fleet)
    shrunk = scale(fleet, "w", "1", "--wait", "60")
    assert shrunk.returncode == 0, shrunk.stderr + fleet.stderr
    assert len(ready(fleet)) == 1
    assert all(len(one.whole()) == LONG for one in streams)
    assert httpx.get(f"{fleet.base}/health", timeout=5).json()["status"] == "ok"
    assert "Traceback" not in fleet.stderr, fleet.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("w", "0"), 2, "Invalid value for 'N'"),
        (("p", "2"), 2, "Invalid value for"),
        (("w", "many"), 2, "Invalid value for 'N'"),
        (("w", "257"), 1, "257 workers: from 1 to 256"),
        (("w", "2", "--model", "other"), 1, "no `kvfleet up` with a model other answers"),
        (("w", "2", "--nats-url", "nats://127.0.0.1:1"), 1, "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(fleet: Up, arguments: tuple[str, ...], code: int, says: str) -> None:
    done = scale(fleet, *arguments)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_fleet_that_scales_itself_says_so() -> None:
    up = Up(*FAKE, "--autoscale", "1:2")
    try:
        done = scale(up.wait_ready(), "w", "2")
        assert (done.returncode, "--autoscale" in done.stderr) == (1, True), done.stderr
    finally:
        up.stop()
