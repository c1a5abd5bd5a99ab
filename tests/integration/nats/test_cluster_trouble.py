"""What `cluster_trouble` went through while the other tests ran."""

from __future__ import annotations

import subprocess

import pytest

from tests.integration.nats.cluster_trouble import PARTS


@pytest.mark.first
def test_a_cluster_gets_into_trouble(cluster_trouble: subprocess.Popen[str]) -> None:
    assert cluster_trouble.poll() is None


@pytest.mark.last
def test_a_cluster_in_trouble_serves(cluster_trouble: subprocess.Popen[str]) -> None:
    """Running streams complete with every token once, new requests are served, every worker keeps its life."""
    output, errors = cluster_trouble.communicate(timeout=180)
    held = [line.split()[0] for line in output.splitlines()]
    assert held == [part.__name__ for part in PARTS], f"{output}\n{errors[-6000:]}"
    assert cluster_trouble.returncode == 0, errors[-6000:]
