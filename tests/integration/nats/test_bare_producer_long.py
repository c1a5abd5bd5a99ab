"""deploy/nats does not cut long streams: 5,000 tokens over more than 60 s, msgpack and JSON at the same time."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest


@pytest.mark.first
def test_long_streams_begin(long_streams: subprocess.Popen[str]) -> None:
    assert long_streams.poll() is None


@pytest.mark.last
@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_bare_producer_receives_five_thousand_tokens_over_a_minute(
    long_streams: subprocess.Popen[str], outcome: dict[str, Any], encoding: str
) -> None:
    seen = outcome[encoding]
    assert seen["errors"] == []
    assert seen["tokens"] == 5_000
    assert seen["in_order"]
    assert seen["end"] == "finished"
    assert seen["seconds"] > 60


@pytest.fixture(scope="module")
def outcome(long_streams: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for what began with the session."""
    out, err = long_streams.communicate(timeout=150)
    assert long_streams.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result
