"""Ports that servers of tests come back on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvproto.testing.nats_process import free_port, free_ports


def test_free_ports_are_different_ones() -> None:
    assert len(set(free_ports(50))) == 50


def test_one_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, other = taken.getsockname()[1], free_port()
        chosen = iter((port, port, other))
        monkeypatch.setattr("kvproto.testing.nats_process._chance.choice", lambda ports: next(chosen))
        assert free_port() == other


def test_nobody_connects_from_one_by_chance() -> None:
    of_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not of_kernel.exists():
        pytest.skip("Linux alone says which ports it gives away")
    lowest = int(of_kernel.read_text().split()[0])
    assert max(free_ports(50)) < lowest
