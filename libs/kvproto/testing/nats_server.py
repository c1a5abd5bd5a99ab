"""The interface of test servers, their plain configuration, and the check of their identity."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

# Short pings, as in deploy/nats: else clients of a stopped server notice it after two minutes.
PLAIN_CONFIG = 'ping_interval: "2s"\nping_max: 2\njetstream: enabled\n'


class ServerFailed(RuntimeError):
    """A server did not start, or is not the one that was started; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """`config` may name files beside it: its folder is the server's working directory. Address, port and store are set
    from outside. `environment` has the variables of `config`. Without `config`: JetStream, no accounts."""

    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class NatsServer(Protocol):
    """A running server that listens on loopback only (in a container of its own network: published there)."""

    @property
    def url(self) -> str:
        """`nats://HOST:PORT`, without credentials."""

    @property
    def kind(self) -> str:
        """`process`, or `container` and its network, for the summary of a test run."""

    def log(self) -> str: ...

    def stop(self) -> None:
        """Also removes what it left. May be called twice."""


def greeting(url: str, timeout_s: float = 2.0) -> dict[str, Any]:
    """A server's INFO document, which needs no credentials. Raises OSError or ServerFailed."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "127.0.0.1", where.port or 4222), timeout_s) as connection:
        line = connection.makefile("rb").readline(65536)
    if not line.startswith(b"INFO "):
        raise ServerFailed(f"what listens at {url} is no NATS server: {line[:80]!r}")
    info: dict[str, Any] = json.loads(line[5:])
    return info


def check_identity(url: str, name: str) -> None:
    """Raises ServerFailed unless the server at `url` is the one called `name`, as ports are reused."""
    found = greeting(url).get("server_name")
    if found != name:
        raise ServerFailed(f"the server at {url} is {found!r}, not {name!r}")
