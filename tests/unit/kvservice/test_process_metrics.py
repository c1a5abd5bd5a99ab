"""What every process shows: build, NATS, certificates, memory and files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from kvservice.metrics import LiveCollector, build_version, common_readings

ENDS = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


def certificate(path: Path, ends: datetime) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(ends - timedelta(days=30))
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return path


def lines(connection: Any, certificates: dict[str, Path | str | None]) -> list[str]:
    registry = CollectorRegistry()
    registry.register(LiveCollector(common_readings("worker", connection, certificates)))
    return generate_latest(registry).decode().splitlines()


def test_build_and_connection() -> None:
    connection = SimpleNamespace(is_connected=True, reconnects_total=3, errors_total=2)
    shown = lines(connection, {"nats": None})
    assert f'kvfleet_build_info{{role="worker",version="{build_version()}"}} 1.0' in shown
    assert "kvfleet_nats_connections 1.0" in shown
    assert "kvfleet_nats_reconnects_total 3.0" in shown
    assert "kvfleet_nats_errors_total 2.0" in shown
    connection.is_connected = False
    assert "kvfleet_nats_connections 0.0" in lines(connection, {})


def test_certificates_as_they_are_now(tmp_path: Path) -> None:
    connection = SimpleNamespace(is_connected=True, reconnects_total=0, errors_total=0)
    path = certificate(tmp_path / "node.crt", ENDS)
    name = 'kvfleet_certificate_expiry_seconds{certificate="nats"}'
    given: dict[str, Path | str | None] = {"nats": str(path), "data_plane": None}

    def shown() -> list[float]:
        return [float(line.split()[1]) for line in lines(connection, given) if line.startswith(name)]

    assert shown() == [ENDS.timestamp()]
    certificate(path, ENDS + timedelta(days=90))
    assert shown() == [ENDS.timestamp() + 90 * 86400]
    path.write_text("no certificate")
    assert shown() == []
    path.unlink()
    assert shown() == []


def test_memory_processor_time_and_files() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    shown = generate_latest(registry).decode()
    names = "resident_memory_bytes", "cpu_seconds_total", "open_fds", "start_time_seconds"
    for name in (f"process_{name}" for name in names):
        assert f"\n{name} " in shown
