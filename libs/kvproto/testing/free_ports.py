"""Ports for servers of tests that are known in advance, or that restart on the same one.

They are below the kernel's ephemeral ports: while a server is down, no other process gets its port by chance.
"""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(10_000, 32_000)
_chance = random.SystemRandom()  # processes that run side by side choose differently, whatever a test seeds


def free_port() -> int:
    while True:
        port = _chance.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
