"""Renders deploy/k8s as `kubectl apply -k` would, and picks the tool for it. Each folder is rendered once."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (K8S / "overlays").iterdir() if path.is_dir()))
COMPONENTS = tuple(sorted(path.name for path in (K8S / "components").iterdir() if path.is_dir()))

IMAGES = ("kvfleet-control", "kvfleet-worker", "kvfleet-vllm", "kvfleet-nats")

Object = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, seven times as fast


@functools.cache
def renderer() -> tuple[str, ...] | None:
    """The command before the folder; None if there is no such tool here."""
    fetched = ROOT / ".tools" / "bin" / "kustomize"
    if fetched.exists():
        return (str(fetched), "build")
    if found := shutil.which("kustomize"):
        return (found, "build")
    if found := shutil.which("kubectl"):  # one older than 1.21 knows no components
        version = subprocess.run([found, "kustomize", str(K8S / "base")], capture_output=True, text=True, check=False)
        return (found, "kustomize") if version.returncode == 0 else None
    return None


def render_or_fail(folder: Path) -> list[Object]:
    """Raises CalledProcessError with what the tool says."""
    command = renderer()
    if command is None:
        pytest.skip("no kustomize that knows components: scripts/deploy_tools fetches one into .tools/bin")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.load_all(done.stdout, LOADER) if found]


@functools.cache
def render(overlay: str) -> tuple[Object, ...]:
    """An overlay by its name, or `base`. Not to be changed: whoever breaks something takes a copy."""
    folder = K8S / "base" if overlay == "base" else K8S / "overlays" / overlay
    return tuple(render_or_fail(folder))


def gke_with_gateway(folder: Path) -> list[Object]:
    """The overlay gke-gpu with the other balancer, changed as its kustomization says."""
    file = copied(folder) / "overlays" / "gke-gpu" / "kustomization.yaml"
    text = file.read_text()
    line = "../../components/balancer-gke # or gateway-gke"
    assert line in text
    file.write_text(text.replace(line, "../../components/gateway-gke"))
    return render_or_fail(file.parent)


def copied(folder: Path) -> Path:
    """deploy/k8s, to break something in it."""
    shutil.copytree(K8S.parent / "nats", folder / "deploy" / "nats")
    return Path(shutil.copytree(K8S, folder / "deploy" / "k8s"))


def combinations() -> list[tuple[str, ...]]:
    """Base alone, with each component alone, and with all of them, for either kind of monitoring."""
    alone = tuple(name for name in COMPONENTS if name != "balancer-gke")  # that one wants the overlay's settings
    shared = tuple(name for name in alone if not name.startswith("monitoring") and name != "gateway-gke")
    return [(), *((name,) for name in alone), (*shared, "monitoring"), (*shared, "gateway-gke", "monitoring-gke")]


def render_combination(components: tuple[str, ...], folder: Path) -> list[Object]:
    """Base with components, as an overlay in `folder` would have them."""
    here = folder / "+".join(("base", *components))
    here.mkdir(parents=True)
    wanted = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "kvfleet",
        "resources": [os.path.relpath(K8S / "base", here)],
        "images": [{"name": name, "newTag": "tested"} for name in IMAGES],  # base leaves that to overlays
        "components": [os.path.relpath(K8S / "components" / name, here) for name in components],
    }
    (here / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
    return render_or_fail(here)
