"""Ports of this machine: that of the ingress, those of vLLM servers, and those of the fleet's metrics."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BACKLOG = 2048
LATER = range(10_000, 32_000)  # below those that the system gives to connections: none gets one meanwhile by chance
TRIES = 200
FOLDER = "targets"
FILE = "kvfleet.json"


class PortTaken(OSError):
    """Says where and why."""


def claim(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises PortTaken."""
    if not port:
        return free_ports(host, 1)[0]
    with _bound(host, port):
        return port


def free_ports(host: str, count: int) -> list[int]:
    """That many different ones, for servers that listen there a while later. Raises PortTaken."""
    found: list[int] = []
    for port in random.SystemRandom().sample(LATER, TRIES):
        if len(found) == count:
            break
        with contextlib.suppress(PortTaken), _bound(host, port):
            found.append(port)
    if len(found) < count:
        raise PortTaken(f"no port is free on {host}")
    return found


def listen(host: str, port: int) -> socket.socket:
    """Clients can connect to it, and wait there until a process that has it accepts them. Raises PortTaken."""
    return _bound(host, port, BACKLOG)


def _bound(host: str, port: int, backlog: int | None = None) -> socket.socket:
    try:
        bound = socket.socket(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0])
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            if backlog is not None:
                bound.listen(backlog)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


@dataclass(eq=False, slots=True)
class MetricsTargets:
    """A metrics port for each process, and a file that lists them for Prometheus's `file_sd_configs`.

    `base`: the first of consecutive ports; 0: any free ones; None: no metrics."""

    base: int | None
    claim: Callable[[int], int]  # as `claim`, of one host
    addresses: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)

    def flags(self, service: str, member: str, host: str = "127.0.0.1", *, or_any: bool = False) -> list[str]:
        """The process's flags, the same at each start, with the first port that no process of the fleet has. Raises
        PortTaken if a stranger has it; with `or_any` takes a free one instead."""
        if self.base is None:
            return []
        taken = {port for _, port in self.addresses.values()}
        wanted = next(port for port in itertools.count(self.base) if port not in taken) if self.base else 0
        try:
            port = self.claim(wanted)
        except PortTaken:
            if not or_any:
                raise
            port = self.claim(0)
        while port in taken:  # a free one, that nobody listens at yet
            port = self.claim(0)
        self.addresses[service, member] = host, port
        return [f"--metrics-port={port}"]

    def forget(self, service: str, member: str) -> None:
        self.addresses.pop((service, member), None)

    def write(self, state: Path) -> Path | None:
        """Returns the file, if there is anything to list."""
        if self.base is None:
            return None
        folder = state / FOLDER
        folder.mkdir(exist_ok=True)
        listed = [
            {"targets": [f"{host}:{port}"], "labels": {"service": service, "member": member}}
            for (service, member), (host, port) in self.addresses.items()
        ]
        fresh = folder / f".{FILE}"
        fresh.write_text(json.dumps(listed, indent=2) + "\n")
        os.replace(fresh, folder / FILE)  # who reads it meanwhile sees the old or the new one
        return folder / FILE
