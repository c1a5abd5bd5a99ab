"""The fixture of a fleet in containers, where there is no daemon. With one: tests/containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproto.testing.fixtures import FleetFactory


def test_without_a_daemon_the_test_is_skipped_and_says_why(
    kvfleet_containers: FleetFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.delenv("KVFLEET_TEST_CONTAINERS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no fleet in containers: no Docker daemon answers"):
        kvfleet_containers()


def test_demanded_it_is_a_failure(
    kvfleet_containers: FleetFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("KVFLEET_TEST_CONTAINERS", "demand")
    with pytest.raises(ConnectionError):
        kvfleet_containers()
