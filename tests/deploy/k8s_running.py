"""Starts what pods would start: each container's command with its environment, files and Secrets, on this machine: in
folders, on free ports. What is changed beside those is named where it is.

A pod's volumes are folders; Secrets are files of a `kvfleet secrets` folder, by the README's names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvproto.testing.nats_process import find_nats_server, free_port
from tests.deploy.k8s_objects import Object, Pod, environment, named, pods
from tests.deploy.k8s_references import SECRETS
from tests.deploy.k8s_render import ROOT
from tests.support.secrets_rig import Secrets

SERVERS = 3
PAIRS = {"kvfleet-nats-tls": "nats", "kvfleet-node-tls": "node", "kvfleet-ingress-tls": "nats"}  # it names 127.0.0.1


@dataclass
class Running:
    """A container as a process. `paths` are its mounts, and where they are here."""

    name: str
    folder: Path
    command: list[str]
    env: dict[str, str]
    ports: dict[str, int]  # by the container's names
    paths: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.env, stdout=log, stderr=log, cwd=ROOT)

    @property
    def log(self) -> str:
        return f"{self.name}:\n{(self.folder / 'log').read_text()[-4000:]}"

    def get(self, path: str, port: str) -> tuple[int, Any]:
        """Status, and what it answered if that is JSON; 0 if nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=5) as answer:
                body = answer.read()
                return int(answer.status), json.loads(body) if body.startswith(b"{") else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None
        except OSError:
            return 0, None


def replaced(text: str, pairs: Mapping[str, str]) -> str:
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text


def secret_file(secrets: Secrets, name: str, key: str) -> bytes:
    """A key of a Secret, from the folder that it is made of."""
    if name in PAIRS:
        of = "ca.crt" if key == "ca.crt" else f"{PAIRS[name]}.{key.rpartition('.')[2]}"
    elif name == "kvfleet-nkeys":
        of = f"nkeys/{key}"
    else:
        of = key
    return (secrets.folder / of).read_bytes()


def _mount(pod: Pod, objects: Sequence[Object], secrets: Secrets, folder: Path) -> dict[str, str]:
    """Makes its volumes; mount path -> folder here."""
    (container,) = pod.containers
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    paths = {}
    for mount in container["volumeMounts"]:
        here = folder / mount["name"]
        here.mkdir(parents=True)
        paths[mount["mountPath"]] = str(here)
        volume = volumes.get(mount["name"], {})
        sources = list(volume.get("projected", {}).get("sources", []))
        if "secret" in volume:
            sources.append({"secret": {**volume["secret"], "name": volume["secret"]["secretName"]}})
        for path, content in _files(sources, objects, secrets).items():
            (here / path).parent.mkdir(exist_ok=True)
            (here / path).write_bytes(content)
    return dict(sorted(paths.items(), reverse=True))  # the longest first


def _files(sources: Sequence[Object], objects: Sequence[Object], secrets: Secrets) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for source in sources:
        if wanted := source.get("configMap"):
            data = named(objects, "ConfigMap", wanted["name"])["data"]
            for item in wanted.get("items") or [{"key": key, "path": key} for key in data]:
                found[item["path"]] = data[item["key"]].encode()
        elif wanted := source.get("secret"):
            keys = SECRETS[wanted["name"]] or set()
            for item in wanted.get("items") or [{"key": key, "path": key} for key in keys]:
                found[item["path"]] = secret_file(secrets, wanted["name"], item["key"])
    return found


def nats_servers(objects: Sequence[Object], secrets: Secrets, folder: Path) -> list[Running]:
    """The StatefulSet's pods, not started yet. Addresses and ports stand in files, and are changed there."""
    (pod,) = [one for one in pods(objects) if one.component == "nats"]
    (container,) = pod.containers
    ports = [{name: free_port() for name in pod.ports()} for _ in range(SERVERS)]
    found = []
    for number, own in enumerate(ports):
        name = f"nats-{number}"
        paths = _mount(pod, objects, secrets, folder / name)
        here = {
            **paths,
            "0.0.0.0:8222": f"127.0.0.1:{own['monitor']}",
            "0.0.0.0:6222": f"127.0.0.1:{own['cluster']}",
            'host: "0.0.0.0"': 'host: "127.0.0.1"',
            "port: 4222": f"port: {own['client']}",
        }
        for file in (folder / name).rglob("*.conf"):
            file.write_text(replaced(file.read_text(), here))
        told = environment(container, objects) | {"KVF_SERVER_NAME": name} | secrets.nats_env
        routes = {f"nats-{other}.nats:6222": f"127.0.0.1:{ports[other]['cluster']}" for other in range(SERVERS)}
        env = {key: replaced(value or "", routes) for key, value in told.items()}
        command = [str(find_nats_server()), *(replaced(part, paths) for part in container["command"][1:])]
        found.append(Running(name, folder / name, command, env, own, paths))
    return found


def of_image(
    pod: Pod, objects: Sequence[Object], secrets: Secrets, folder: Path, servers: Sequence[Running]
) -> Running:
    """A container of ours: `kvfleet` with its arguments, not started yet."""
    (container,) = pod.containers
    name = f"{pod.component}-0"
    paths = _mount(pod, objects, secrets, folder / name)
    ports = {port: free_port() for port in pod.ports()}
    own = {f"nats-{number}.nats:4222": f"127.0.0.1:{one.ports['client']}" for number, one in enumerate(servers)}
    fields = {"KVFLEET_ID": name, "KVFLEET_DATA_PLANE_ADVERTISE": "127.0.0.1", "KVFLEET_THREADS": "1"}
    listens = {"KVFLEET_METRICS_PORT": "metrics", "KVFLEET_PORT": "https", "KVFLEET_DATA_PLANE_PORT": "data-plane"}
    told = environment(container, objects)
    env = {key: replaced(value or fields.get(key, ""), {**paths, **own}) for key, value in told.items()}
    env |= {key: str(ports[port]) for key, port in listens.items() if key in env}
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("KVFLEET_")},
        **{key: "127.0.0.1" if value == "0.0.0.0" else value for key, value in env.items()},
        "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}",
    }
    command = [sys.executable, "-P", "-m", "kvfleet.cli.main", *container["args"]]
    return Running(name, folder / name, command, env, ports, paths)
