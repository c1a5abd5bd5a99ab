"""Renders deploy/helm/kvfleet as `helm install` would, and brings objects into a form in which kustomize's and Helm's
compare.

What the two may differ in: the order, labels that say who made an object, the hash that kustomize and the init Job have
in their names, the checksums by which Helm's pods roll, the pool in selectors, and the Namespace, which Helm does not
make."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.k8s_objects import Object, title
from tests.deploy.k8s_render import LOADER, ROOT

CHART = ROOT / "deploy" / "helm" / "kvfleet"
VALUES = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}

OF_MAKERS = {
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "helm.sh/chart",
    "kvfleet.dev/pool",
    "checksum/settings",
}


@functools.cache
def helm() -> str:
    fetched = ROOT / ".tools" / "bin" / "helm"
    found = str(fetched) if fetched.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("no helm: scripts/deploy_tools fetches one into .tools/bin")
    return found


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT)


def template(*arguments: str | Path, kubernetes: str = "1.34", chart: Path = CHART) -> list[Object]:
    done = run_helm("template", "fleet", chart, "--namespace=kvfleet", f"--kube-version={kubernetes}", *arguments)
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.load_all(done.stdout, LOADER) if found]
    for one in objects:
        if one["kind"] != "PriorityClass":
            one["metadata"]["namespace"] = "kvfleet"  # where `helm install` puts them
    return objects


def refused(*arguments: str | Path, kubernetes: str = "1.34") -> str:
    """What Helm says of what it does not take."""
    done = run_helm("template", "fleet", CHART, f"--kube-version={kubernetes}", *arguments)
    assert done.returncode != 0
    return done.stderr


def comparable(objects: Iterable[Object]) -> dict[str, Any]:
    """By kind and name."""
    kept = [one for one in objects if one["kind"] != "Namespace"]
    hashed = {name for one in kept if one["kind"] == "ConfigMap" if (name := one["metadata"]["name"]) != _bare(name)}
    return {title(one): one for one in (_plain(one, hashed) for one in kept)}


def _bare(name: str) -> str:
    """Without kustomize's hash, or that of the init Job."""
    return re.sub(r"^(init)-[0-9a-f]{8}$|-[0-9bcdfghkmt2456789]{10}$", r"\1", name)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(value: Any, hashed: set[str]) -> Any:
    if isinstance(value, dict):
        plain = {key: _plain(one, hashed) for key, one in value.items() if key not in OF_MAKERS and key != "namespace"}
        if value.get("kind") == "Job":
            plain["metadata"]["name"] = _bare(value["metadata"]["name"])
        if isinstance(value.get("expr"), str):  # kustomize writes some of a rule's line breaks twice
            plain["expr"] = " ".join(value["expr"].split())
        return {key: one for key, one in plain.items() if one or key not in ("labels", "annotations")}
    if isinstance(value, list):
        plain_list = [_plain(one, hashed) for one in value]
        named = all(isinstance(one, dict) and {"name", "mountPath", "secret"} & one.keys() for one in value)
        return sorted(plain_list, key=_text) if named else plain_list
    return _bare(value) if isinstance(value, str) and value in hashed else value
