"""Metrics of every process: its build, its connection to NATS, its certificates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from kvservice.metrics import Reading

if TYPE_CHECKING:
    from kvproto.connection import Connection

log = logging.getLogger(__name__)


def common_readings(role: str, connection: Connection, certificates: Mapping[str, str | Path | None]) -> list[Reading]:
    """`certificates`: PEM files by their use."""
    there = {use: Path(path) for use, path in certificates.items() if path is not None}
    return [
        Reading(
            "kvfleet_build_info",
            "1; its labels say what runs",
            labels=("version", "role"),
            read_labelled=lambda: {(build_version(), role): 1.0},
        ),
        Reading(
            "kvfleet_nats_connections",
            "connections to NATS that stand: 1, or 0 in an outage",
            lambda: connection.is_connected,
        ),
        Reading("kvfleet_nats_reconnects_total", "reconnects to NATS", lambda: connection.reconnects_total),
        Reading("kvfleet_nats_errors_total", "errors of NATS or its client", lambda: connection.errors_total),
        Reading(
            "kvfleet_certificate_expiry_seconds",
            "when this process's own certificate ends, in Unix time",
            labels=("certificate",),
            read_labelled=lambda: {(use,): end for use, path in there.items() if (end := _ends_at(path)) is not None},
        ),
    ]


@cache
def build_version() -> str:
    try:
        return version("kvfleet")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def _ends_at(path: Path) -> float | None:
    """Read at each scrape, as certificates are renewed while a process runs."""
    from cryptography import x509  # only a process with certificates loads it

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        log.debug("certificate %s cannot be read: %s", path, error)
        return None
