"""Adapter: the Docker daemon of a test run, and leftovers of earlier runs.

testcontainers' reaper is an image that would be pulled, so it is off: tests label what they start.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LABEL = "kvproto.testing.owner"  # "<pid>@<host>" of the test run
DEFAULT_DAEMON = "unix:///var/run/docker.sock"
DAEMON_TIMEOUT_S = 30


def client() -> Any:
    """A client of the daemon at DOCKER_HOST or the default socket. Raises ConnectionError if none answers there."""
    import docker

    host = os.environ.get("DOCKER_HOST") or DEFAULT_DAEMON
    if host.startswith("unix://"):  # docker-py leaves a socket open when there is no daemon
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(host.removeprefix("unix://")) != 0:
                raise ConnectionError(f"no Docker daemon answers at {host}")
    found = docker.from_env(timeout=DAEMON_TIMEOUT_S)
    try:
        found.ping()
    except BaseException:
        found.close()
        raise
    return found


def owner() -> str:
    return f"{os.getpid()}@{socket.gethostname()}"


@contextlib.contextmanager
def tidied() -> Iterator[Any]:
    """A client, once containers and networks of test runs on this host that have ended are removed. Raises as `client`
    does."""
    import docker.errors

    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # read when testcontainers is imported

    def is_leftover(labels: dict[str, str]) -> bool:
        pid, _, host = labels.get(LABEL, "").partition("@")
        return host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists()

    with contextlib.closing(client()) as found:
        with contextlib.suppress(docker.errors.APIError):
            for container in found.containers.list(all=True, filters={"label": LABEL}):
                if is_leftover(container.labels):
                    container.remove(force=True, v=True)
            for network in found.networks.list(filters={"label": LABEL}):
                if is_leftover(network.attrs.get("Labels") or {}):
                    network.remove()
        yield found
