"""Adapter: a fleet in containers of the images that scripts/build_images makes, for tests of projects that use a fleet.

    with FleetContainers.start(workers=2) as fleet:
        httpx.post(f"{fleet.base}/generate", ...)
        fleet.workers[0].kill()

They run on a network of their own, with one ingress published on loopback. Every container has a read-only root, no
capabilities and an unprivileged user; /tmp and the home are in memory. NATS has no accounts here.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from kvproto.testing.docker_daemon import LABEL, owner, tidied

TAG = "dev"
HTTP_PORT = 8080
START_TIMEOUT_S = 180.0
HOME = "/var/lib/kvfleet"
TMPFS = {"/tmp": "mode=1777,size=64m,noexec,nosuid,nodev", HOME: "uid=10001,gid=10001,mode=0750"}
NATS_COMMAND = ("-a", "0.0.0.0", "-m", "8222", "-js", "-sd", HOME)
# For a laptop: a container may not see how much memory it has.
SIZES = {"KVFLEET_BLOCKS": "2048", "KVFLEET_HOST_BYTES": "67108864", "KVFLEET_MAX_BYTES": "134217728"}
CONTROL = ("placement", "vault", "ingress", "init")


class FleetNotStarted(Exception):
    """Says which container, and why."""


class ImageMissing(Exception):
    """Says which, and what builds it."""


class FleetContainer:
    """One process in one container; `FleetContainers` starts it and removes it."""

    def __init__(self, name: str, role: str, container: Any) -> None:
        self.name = name
        self.role = role
        self._started = container
        self._docker = container._container

    @property
    def attributes(self) -> dict[str, Any]:
        """The daemon's present record of it."""
        self._docker.reload()
        found: dict[str, Any] = self._docker.attrs
        return found

    @property
    def health(self) -> str:
        """`starting`, `healthy`, `unhealthy`, or `exited 0`, with the exit code."""
        state = self.attributes["State"]
        return state["Health"]["Status"] if state["Running"] else f"exited {state['ExitCode']}"

    def run(self, *command: str) -> tuple[int, str]:
        """Exit code and output of a command inside it."""
        code, output = self._docker.exec_run(list(command))
        return int(code), bytes(output).decode(errors="replace")

    def log(self) -> str:
        return bytes(self._docker.logs()).decode(errors="replace")

    def kill(self) -> None:
        self._docker.kill()

    def stop(self, grace_s: int = 30) -> int:
        """The exit code, 137 if the grace time was too short."""
        self._docker.stop(timeout=grace_s)
        return int(self.attributes["State"]["ExitCode"])

    def restart(self) -> None:
        self._docker.start()

    def port(self, inside: int) -> int:
        return int(self._started.get_exposed_port(inside))


class FleetContainers:
    """Owned by its starter; `stop` removes everything, also after a failed start."""

    def __init__(self, network: Any, tag: str, environment: Mapping[str, str]) -> None:
        self.containers: list[FleetContainer] = []
        self._network = network
        self._tag = tag
        self._environment = {"KVFLEET_NATS_URL": "nats://nats:4222", "KVFLEET_FLEET_KEY": uuid.uuid4().hex}
        self._environment |= {**SIZES, **environment}
        self._undo = contextlib.ExitStack()
        self._undo.callback(network.remove)

    @classmethod
    def start(
        cls,
        *,
        workers: int = 2,
        placements: int = 1,
        vaults: int = 0,
        environment: Mapping[str, str] | None = None,
        tag: str | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> FleetContainers:
        """A serving fleet. `environment`: settings of all its processes, KVFLEET_*; `tag` of the images: default
        KVFLEET_TAG, else dev. Raises ConnectionError or docker's errors, ImageMissing, FleetNotStarted."""
        tag = tag or os.environ.get("KVFLEET_TAG") or TAG
        _check_images(tag)
        from testcontainers.core.network import Network

        network = Network(docker_network_kw={"labels": {LABEL: owner()}}).create()
        fleet = cls(network, tag, {"KVFLEET_WORKERS_ON_HOST": str(max(1, workers)), **(environment or {})})
        try:
            until = time.monotonic() + timeout_s
            fleet._await("healthy", until, fleet.add("nats", "nats"))
            fleet._await("exited 0", until, fleet.add("init", "init"))
            for role, count in (("placement", placements), ("vault", vaults), ("worker", workers), ("ingress", 1)):
                for number in range(count):
                    fleet.add(role, f"{role}-{number}")
            fleet._await("healthy", until, *(one for one in fleet.containers if one.role != "init"))
        except BaseException:
            fleet.stop()
            raise
        return fleet

    @property
    def base(self) -> str:
        """The ingress's URL."""
        return f"http://127.0.0.1:{self.of('ingress')[0].port(HTTP_PORT)}"

    @property
    def workers(self) -> list[FleetContainer]:
        return self.of("worker")

    def of(self, role: str) -> list[FleetContainer]:
        return [one for one in self.containers if one.role == role]

    def named(self, name: str) -> FleetContainer:
        """By its id in the fleet, as in `GET /workers`."""
        return next(one for one in self.containers if one.name == name)

    def add(self, role: str, name: str, environment: Mapping[str, str] | None = None) -> FleetContainer:
        """One more process with the id `name`; not awaited."""
        from docker.types import Healthcheck
        from testcontainers.core.container import DockerContainer

        image = "control" if role in CONTROL else role
        container = DockerContainer(f"kvfleet-{image}:{self._tag}")
        container.with_command(list(NATS_COMMAND) if role == "nats" else [role])
        container.with_network(self._network).with_network_aliases(name)
        settings = dict(self._environment)
        if role not in ("nats", "init"):
            settings["KVFLEET_ID"] = name
        check = None  # the image's
        if role == "ingress":
            check = ["CMD", "python", "-m", "kvservice.health", "--port", str(HTTP_PORT)]
            container.with_exposed_ports(HTTP_PORT)
            container.ports[str(HTTP_PORT)] = ("127.0.0.1",)
        container.with_envs(**{**settings, **(environment or {})})
        container.tmpfs.update(TMPFS)
        second = 1_000_000_000
        container.with_kwargs(
            labels={LABEL: owner()},
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            hostname=name,
            healthcheck=Healthcheck(
                test=check, interval=second, timeout=5 * second, retries=3, start_period=600 * second
            ),
        )
        self._undo.callback(container.stop)
        container.start()
        made = FleetContainer(name, role, container)
        self.containers.append(made)
        return made

    def stop(self) -> None:
        self._undo.close()
        self.containers.clear()

    def __enter__(self) -> FleetContainers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await(self, wanted: str, until: float, *containers: FleetContainer) -> None:
        for one in containers:
            while (now := one.health) != wanted:
                if now.startswith("exited") or time.monotonic() > until:
                    raise FleetNotStarted(f"{one.name} is {now}, not {wanted}:\n{one.log()[-3000:]}")
                time.sleep(0.1)


def _check_images(tag: str) -> None:
    import docker.errors

    with tidied() as client:
        for image in ("control", "worker", "nats"):
            try:
                client.images.get(f"kvfleet-{image}:{tag}")
            except docker.errors.ImageNotFound:
                raise ImageMissing(f"no image kvfleet-{image}:{tag}: run scripts/build_images") from None
