"""Ports of this machine: whether one can be listened at, before a process is started that would fail over it."""

from __future__ import annotations

import socket


class PortTaken(OSError):
    """Nobody else can listen there; says where and why."""


def claim(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises PortTaken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
