"""Ports for metrics, and the list that Prometheus reads."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kvfleet.cli.embedded.ports import TRIES, MetricsTargets, PortTaken, claim, free_ports


def test_consecutive_ports_and_a_list_of_all(tmp_path: Path) -> None:
    targets = MetricsTargets(9100, lambda wanted: wanted)
    assert targets.flags("vault", "v0") == ["--metrics-port=9100"]
    assert targets.flags("worker", "w0") == ["--metrics-port=9101"]
    assert targets.flags("ingress", "i0", "[::1]") == ["--metrics-port=9102"]
    path = targets.write(tmp_path)
    assert path == tmp_path / "targets" / "kvfleet.json"
    assert json.loads(path.read_text()) == [
        {"targets": ["127.0.0.1:9100"], "labels": {"service": "vault", "member": "v0"}},
        {"targets": ["127.0.0.1:9101"], "labels": {"service": "worker", "member": "w0"}},
        {"targets": ["[::1]:9102"], "labels": {"service": "ingress", "member": "i0"}},
    ]
    assert list(path.parent.iterdir()) == [path]


def test_free_ports_are_different_ones() -> None:
    free = iter((5000, 5000, 5000, 5001))
    targets = MetricsTargets(0, lambda wanted: next(free))
    assert targets.flags("worker", "w0") == ["--metrics-port=5000"]
    assert targets.flags("worker", "w1") == ["--metrics-port=5001"]


def test_a_port_for_later_is_one_that_no_connection_gets_meanwhile() -> None:
    """A vLLM server takes a minute to load before its worker listens where it was told to."""
    of_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(of_kernel.read_text().split()[0]) if of_kernel.exists() else 32_768
    found = [*free_ports("127.0.0.1", 20), claim("127.0.0.1", 0)]
    assert max(found) < lowest
    assert len(set(found[:20])) == 20


def test_no_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port, free = stranger.getsockname()[1], claim("127.0.0.1", 0)
        monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [port] * (TRIES - 1) + [free])
        assert free_ports("127.0.0.1", 1) == [free]
        with pytest.raises(PortTaken, match="no port is free"):
            free_ports("127.0.0.1", 2)


def test_nobody_has_one_unless_asked(tmp_path: Path) -> None:
    targets = MetricsTargets(None, lambda wanted: wanted)
    assert targets.flags("worker", "w0") == []
    assert targets.write(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_a_stranger_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        base = stranger.getsockname()[1]
        targets = MetricsTargets(base, lambda wanted: claim("127.0.0.1", wanted))
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{base}: "):
            targets.flags("worker", "w0")
        (flag,) = targets.flags("worker", "w0", or_any=True)
        assert flag.startswith("--metrics-port=")
        assert flag != f"--metrics-port={base}"


def test_who_is_gone_is_listed_no_more_and_its_port_is_the_next_ones(tmp_path: Path) -> None:
    targets = MetricsTargets(9100, lambda wanted: wanted)
    for member in ("w0", "w1", "w2"):
        targets.flags("worker", member)
    targets.forget("worker", "w1")
    targets.forget("worker", "nobody")
    path = targets.write(tmp_path)
    assert path
    assert [one["labels"]["member"] for one in json.loads(path.read_text())] == ["w0", "w2"]
    assert targets.flags("worker", "w3") == ["--metrics-port=9101"]
    assert targets.flags("worker", "w4") == ["--metrics-port=9103"]
