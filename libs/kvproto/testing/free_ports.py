"""Ports for servers of tests that must be known before they listen, or that come back on the same one.

They are below those that the kernel gives to outgoing connections and to who asks for any port: while a server is
down, nobody gets its port by chance.
"""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(10_000, 32_000)
_chance = random.SystemRandom()  # processes that run side by side choose differently, whatever a test seeds


def free_port() -> int:
    """One at which nothing listens."""
    while True:
        port = _chance.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def free_ports(count: int) -> list[int]:
    """Different ones."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
