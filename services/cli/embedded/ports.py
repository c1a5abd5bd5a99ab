"""Ports of this machine: listened at for a process, or tried before one is started that would fail over it."""

from __future__ import annotations

import socket

BACKLOG = 2048


class PortTaken(OSError):
    """Nobody else can listen there; says where and why."""


def claim(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises PortTaken."""
    with _bound(host, port) as probe:
        return int(probe.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """Clients can connect to it, and wait there until a process that has it accepts them. Raises PortTaken."""
    listener = _bound(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from None
    return listener


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
    except OSError as error:
        raise _taken(host, port, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _taken(host, port, error) from None
    return bound


def _taken(host: str, port: int, error: OSError) -> PortTaken:
    return PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}")
