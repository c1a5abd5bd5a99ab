"""Adapter: the server in a container, through testcontainers and docker-py, without a registry.

The image is built `FROM scratch` from the executable of the process backend, so nothing is pulled. Two networks are
tried: the host's (on loopback, without a bridge), else an own one with a published port (for a remote daemon).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproto.testing.docker_daemon import LABEL, owner, tidied
from kvproto.testing.nats_process import PLAIN_CONFIG, ServerFailed, ServerSpec, check_identity, find_nats_server

CLIENT_PORT = 4222
START_TIMEOUT_S = 20.0
_DOCKERFILE = b'FROM scratch\nCOPY nats-server /nats-server\nENTRYPOINT ["/nats-server"]\n'


@dataclass(eq=False, slots=True)
class NatsContainer:
    """One server in one container. `start` is the only way to make one."""

    _container: Any
    kind: str  # `container` and its network
    url: str
    _undo: contextlib.ExitStack

    @classmethod
    def start(cls, spec: ServerSpec) -> NatsContainer:
        """Raises docker's errors (without a daemon, for example), or ServerFailed with the container's log."""
        with tidied() as client:
            image = _image(client)
        try:
            return cls._on_host_network(image, spec)
        except Exception as on_host:  # noqa: BLE001 (any failure there: the other network may do)
            try:
                return cls._on_own_network(image, spec)
            except Exception as error:
                raise ServerFailed(f"on the host's network: {on_host}; on an own network: {error}") from error

    def log(self) -> str:
        return _log(self._container)

    def stop(self) -> None:
        self._undo.close()

    @classmethod
    def _on_host_network(cls, image: str, spec: ServerSpec) -> NatsContainer:
        name, container = _prepare(image, spec, "127.0.0.1", -1)
        with contextlib.ExitStack() as undo:
            undo.callback(container.stop)
            container.with_kwargs(**container._kwargs, network_mode="host").start()
            url = f"nats://127.0.0.1:{_await_port(container)}"
            check_identity(url, name)
            return cls(container, "container, host network", url, undo.pop_all())

    @classmethod
    def _on_own_network(cls, image: str, spec: ServerSpec) -> NatsContainer:
        from testcontainers.core.config import ConnectionMode
        from testcontainers.core.network import Network

        name, container = _prepare(image, spec, "0.0.0.0", CLIENT_PORT)
        with contextlib.ExitStack() as undo:
            network = Network(docker_network_kw={"labels": {LABEL: owner()}}).create()
            undo.callback(network.remove)
            undo.callback(container.stop)
            docker_client = container.get_docker_client()
            is_local = docker_client.get_connection_mode() == ConnectionMode.docker_host
            is_local = is_local and docker_client.host() in ("localhost", "127.0.0.1")
            container.with_exposed_ports(CLIENT_PORT).with_network(network)
            if is_local:
                container.ports[str(CLIENT_PORT)] = ("127.0.0.1",)
            container.start()
            _await_port(container)
            host = "127.0.0.1" if is_local else container.get_container_host_ip()
            url = f"nats://{host}:{container.get_exposed_port(CLIENT_PORT)}"
            _retry(lambda: check_identity(url, name))
            return cls(container, "container, own network", url, undo.pop_all())


def _image(client: Any) -> str:
    """The image's tag, made of the executable's hash, so that it is built once per version."""
    import docker.errors

    binary = find_nats_server().read_bytes()
    tag = f"kvproto-testing-nats:{hashlib.sha256(binary).hexdigest()[:12]}"
    try:
        client.images.get(tag)
        return tag
    except docker.errors.ImageNotFound:
        pass
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, data, mode in (("Dockerfile", _DOCKERFILE, 0o644), ("nats-server", binary, 0o755)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    context.seek(0)
    client.images.build(fileobj=context, custom_context=True, tag=tag, rm=True, pull=False)
    return tag


def _prepare(image: str, spec: ServerSpec, address: str, port: int) -> tuple[str, Any]:
    """The server's name and its container, which is not started yet."""
    from testcontainers.core.container import DockerContainer

    name = f"test-{uuid.uuid4().hex[:12]}"
    container = DockerContainer(image)
    folder = Path("/config")
    if spec.config is None:
        config = folder / "plain.conf"
        container.with_copy_into_container(PLAIN_CONFIG.encode(), str(config))
    else:
        source = spec.config.resolve()
        config = folder / source.parent.name / source.name
        container.with_copy_into_container(source.parent, str(folder))
    container.with_envs(**spec.environment)
    container.with_command(["-c", str(config), "-n", name, "-a", address, "-p", str(port), "-sd", "/store"])
    container.tmpfs["/store"] = "rw"
    container.with_kwargs(labels={LABEL: owner()}, cap_drop=["ALL"], working_dir=str(config.parent))
    return name, container


def _await_port(container: Any) -> int:
    """The port in the log of a server that is ready."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        text = _log(container)
        if "Server is ready" in text:
            line = next(row for row in text.splitlines() if "Listening for client connections on" in row)
            return int(line.rsplit(":", 1)[-1])
        container._container.reload()
        if container._container.status == "exited":
            break
        time.sleep(0.02)
    raise ServerFailed(f"nats-server did not start in its container: {_log(container)[-1000:]}")


def _log(container: Any) -> str:
    out, err = container.get_logs()
    return bytes(out + err).decode(errors="replace")


def _retry(check: Callable[[], None], timeout_s: float = 3.0) -> None:
    """A published port answers a moment after the server does."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return check()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
