"""A network of its own for an experiment: one namespace for the harness, one per host, cables between that can be cut.

    lab (harness, nats-server) 10.213.0.1 ──bridge──┬── host w0 10.213.0.10
                                                    └── host w1 10.213.0.11       cut: the cable's end goes down

Nothing of it is seen from the machine's own network, and nothing of that from here. Needs root and iproute2. A cable
that is cut is what a failed switch is: connections stay open and nothing comes through, in either direction.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

ADDRESS = "10.213.0.1"
_FIRST_HOST = 10


def why_not() -> str | None:
    """Why there can be no lab here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    probe = f"kvf{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()[:120]}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


@dataclass(frozen=True)
class Host:
    """One machine of the lab. `command` runs there."""

    name: str
    namespace: str
    lab: str
    cable: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def cut(self) -> None:
        _ip("-n", self.lab, "link", "set", self.cable, "down")

    def heal(self) -> None:
        _ip("-n", self.lab, "link", "set", self.cable, "up")


@dataclass
class Lab:
    """`open` makes it; everything in it must have ended before it is taken down."""

    namespace: str
    hosts: dict[str, Host] = field(default_factory=dict)

    @staticmethod
    @contextlib.contextmanager
    def open(*hosts: str) -> Iterator[Lab]:
        lab = Lab(f"kvf{os.getpid()}lab")
        try:
            _ip("netns", "add", lab.namespace)
            _ip("-n", lab.namespace, "link", "set", "lo", "up")
            _ip("-n", lab.namespace, "link", "add", "br0", "type", "bridge")
            _ip("-n", lab.namespace, "addr", "add", f"{ADDRESS}/24", "dev", "br0")
            _ip("-n", lab.namespace, "link", "set", "br0", "up")
            for number, name in enumerate(hosts):
                lab._add(name, number)
            yield lab
        finally:
            for namespace in (*(host.namespace for host in lab.hosts.values()), lab.namespace):
                subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def command(self, *arguments: str) -> list[str]:
        """Runs where the harness is."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def _add(self, name: str, number: int) -> None:
        host = Host(
            name, f"kvf{os.getpid()}h{number}", self.namespace, f"c{number}", f"10.213.0.{_FIRST_HOST + number}"
        )
        _ip("netns", "add", host.namespace)
        self.hosts[name] = host
        _ip("-n", self.namespace, "link", "add", host.cable, "type", "veth", "peer", "eth0", "netns", host.namespace)
        _ip("-n", self.namespace, "link", "set", host.cable, "master", "br0", "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
