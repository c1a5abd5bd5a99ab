"""What a container tells `kvfleet` means something to it: variables to the settings class of that role, flags to its
command line, paths to what is mounted, ports and probes to what it listens on, the time to end to the time it takes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import typer
from pydantic import ValidationError

from kvfleet.cli.commands import app
from kvfleet.ingress.settings import IngressSettings
from kvfleet.placement.settings import PlacementSettings
from kvfleet.vault.settings import VaultSettings
from kvfleet.worker.settings import WorkerSettings
from kvservice.settings import ServiceSettings
from tests.deploy.k8s_objects import Object, Pod, environment, pods
from tests.deploy.k8s_references import SECRETS

ROLES: dict[str, type[ServiceSettings]] = {
    "ingress": IngressSettings,
    "placement": PlacementSettings,
    "worker": WorkerSettings,
    "vault": VaultSettings,
}
PREFIX = "KVFLEET_"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PROBED = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
# Not ready before a worker is: it is not to be killed for that.
PROBED_OF_INGRESS = PROBED | {"startupProbe": "/livez"}
PORTS = {"KVFLEET_METRICS_PORT": "metrics", "KVFLEET_PORT": "https", "KVFLEET_DATA_PLANE_PORT": "data-plane"}
CLOSE_S = 23.0  # what a process closes after it has drained: five things at most, most of them at once


def process_problems(objects: Sequence[Object]) -> list[str]:
    return [
        f"{pod.name}: {problem}"
        for pod in pods(objects)
        for container in pod.containers
        if not any(other in container["image"] for other in ("kvfleet-nats", "kvfleet-vllm"))
        for problem in _container(pod, container, objects)
    ]


@functools.cache
def commands() -> dict[str, Any]:
    """Of the `kvfleet` command line, by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def variables_of(command: str) -> set[str]:
    """The KVFLEET_* variables that a role or a command reads."""
    if command in ROLES:
        return {PREFIX + name.upper() for name in ROLES[command].model_fields}
    named = [option.envvar for option in commands()[command].params]
    return {one for names in named for one in ([names] if isinstance(names, str) else names or [])}


def settings_of(role: str, variables: dict[str, str | None]) -> ServiceSettings:
    """As the process would read them; what only the cluster knows is left out. Raises ValidationError."""
    told = {
        key.removeprefix(PREFIX).lower(): value
        for key, value in variables.items()
        if key.startswith(PREFIX) and value is not None
    }
    kind: Any = ROLES[role]
    settings: ServiceSettings = kind(_env_prefix="NOTHING_OF_THIS_MACHINE_", **told)
    return settings


def _container(pod: Pod, container: Object, objects: Sequence[Object]) -> Iterator[str]:
    arguments = container.get("args", [])
    if container.get("command") or not arguments or arguments[0] not in commands():
        yield f"starts {container.get('command', '')} {arguments}, which is no command of the image"
        return
    command = arguments[0]
    if command != pod.component:
        yield f"runs {command} under the name of {pod.component!r}"
    yield from _flags(command, arguments[1:])
    variables = environment(container, objects)
    known = variables_of(command)
    yield from (f"{command} knows no {name}" for name in variables if name.startswith(PREFIX) and name not in known)
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    if hook:
        if hook[0] != "kvfleet" or hook[1] not in commands():
            yield f"preStop: {hook} is no command of the image"
        else:
            yield from (f"preStop: {told}" for told in _flags(hook[1], hook[2:]))
    yield from _paths(pod, container, variables)
    if command not in ROLES:
        return
    try:
        settings = settings_of(command, variables)
    except ValidationError as error:
        yield f"{command}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
        return
    yield from _ports(container, variables)
    yield from _probes(container, PROBED_OF_INGRESS if command == "ingress" else PROBED)
    yield from _grace(pod, command, settings)
    if command in ("worker", "vault") and pod.owner["kind"] != "StatefulSet":
        yield "has no stable name"
    if variables.get("KVFLEET_ID", "") is not None or not _is_field(container, "KVFLEET_ID", "metadata.name"):
        yield "is not called as its pod is"


def _is_field(container: Object, variable: str, path: str) -> bool:
    return any(
        one["name"] == variable and one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == path
        for one in container.get("env", [])
    )


def _flags(command: str, arguments: Sequence[str]) -> Iterator[str]:
    if command in ROLES:
        flags = {f"--{name.replace('_', '-')}" for name in ROLES[command].model_fields}
        told = [one.partition("=")[0] for one in arguments if one.startswith("-")]
        yield from (f"{command} knows no {flag}" for flag in told if flag not in flags)
        return
    try:
        commands()[command].make_context(command, list(arguments))
    except typer.TyperException as error:
        yield f"{command}: {error}"


def mounted_files(container: Object, volumes: Sequence[Object]) -> set[str]:
    """Paths of what Secrets bring."""
    found = set()
    for mount in container.get("volumeMounts", []):
        volume = next((one for one in volumes if one["name"] == mount["name"]), {})
        sources = [one["secret"] for one in volume.get("projected", {}).get("sources", []) if "secret" in one]
        if "secret" in volume:
            sources.append({**volume["secret"], "name": volume["secret"]["secretName"]})
        for source in sources:
            keys = SECRETS.get(source["name"]) or set()
            paths = [item["path"] for item in source["items"]] if "items" in source else sorted(keys)
            found |= {f"{mount['mountPath']}/{path}" for path in paths}
    return found


def _paths(pod: Pod, container: Object, variables: dict[str, str | None]) -> Iterator[str]:
    """Files are read from Secrets, folders are written to: both are on a volume."""
    files = mounted_files(container, pod.spec.get("volumes", []))
    writable = [mount["mountPath"] for mount in container.get("volumeMounts", []) if not mount.get("readOnly")]
    for name, value in variables.items():
        if value is None or not value.startswith("/"):
            continue
        if re.search(r"_(FILE|CERT|KEY|CA|PATH)$", name) and value not in files:
            yield f"{name}: nothing is mounted at {value}"
        if name.endswith("_DIR") and not any(PurePosixPath(value).is_relative_to(folder) for folder in writable):
            yield f"{name}: {value} is on no volume"


def _ports(container: Object, variables: dict[str, str | None]) -> Iterator[str]:
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    for variable, name in PORTS.items():
        if variable in variables and str(ports.get(name)) != variables[variable]:
            yield f"{variable} is {variables[variable]}, the port {name!r} is {ports.get(name)}"
    told = {name for variable, name in PORTS.items() if variable in variables}
    yield from (f"nobody listens on {name!r}" for name in sorted(set(ports) - told))


def _probes(container: Object, wanted: dict[str, str]) -> Iterator[str]:
    for kind in PROBES:
        asked = container.get(kind, {}).get("httpGet")
        if asked is None:
            yield f"no {kind}"
        elif (asked["path"], asked["port"]) != (wanted[kind], "metrics"):
            yield f"{kind} asks for {asked['path']} on {asked['port']!r}"
    if container.get("livenessProbe", {}).get("periodSeconds") != 10:
        yield "livenessProbe is not every 10 s"


def _grace(pod: Pod, role: str, settings: ServiceSettings) -> Iterator[str]:
    needed = getattr(settings, "unready_s", 0.0) + getattr(settings, "drain_s", 0.0) + CLOSE_S
    given = pod.spec.get("terminationGracePeriodSeconds", 30)
    if given < needed:
        yield f"{role} may take {needed:g} s to end, and is given {given}"
