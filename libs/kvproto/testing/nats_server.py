"""What every test server has in common: its interface, its plain configuration, and how it proves to be itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

# Short pings, as in deploy/nats: a test that stops a server must not wait two minutes for somebody to notice.
PLAIN_CONFIG = 'ping_interval: "2s"\nping_max: 2\njetstream: enabled\n'


class ServerFailed(RuntimeError):
    """A server did not start, or is not the one that was started; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to start.

    `config` may name files beside it: its whole folder goes along and is the server's working directory. Address, port
    and store are set from outside, so it names no `store_dir`. `environment` holds the variables that it refers to.
    Without `config`: JetStream, no accounts.
    """

    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class NatsServer(Protocol):
    """A running server that listens on loopback only (in a container of its own network: published there)."""

    @property
    def url(self) -> str:
        """`nats://HOST:PORT`, without credentials."""

    @property
    def kind(self) -> str:
        """`process`, or `container` and its network, for the line that says what tests ran against."""

    def log(self) -> str:
        """What the server has logged so far."""

    def stop(self) -> None:
        """End it and remove what it left. May be called twice."""


def greeting(url: str, timeout_s: float = 2.0) -> dict[str, Any]:
    """The INFO document with which a server greets every connection: its name, version, whether JetStream is on.

    Needs no credentials, so it works for every configuration. Raises OSError or ServerFailed.
    """
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "127.0.0.1", where.port or 4222), timeout_s) as connection:
        line = connection.makefile("rb").readline(65536)
    if not line.startswith(b"INFO "):
        raise ServerFailed(f"what listens at {url} is no NATS server: {line[:80]!r}")
    info: dict[str, Any] = json.loads(line[5:])
    return info


def check_identity(url: str, name: str) -> None:
    """Raises ServerFailed unless the server at `url` is the one called `name`: ports are reused, also by strangers."""
    found = greeting(url).get("server_name")
    if found != name:
        raise ServerFailed(f"the server at {url} is {found!r}, not {name!r}")
