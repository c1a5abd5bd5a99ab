"""scripts/deploy_gke with the real overlay, rendered by kustomize: names, images, and the Secrets that pods read."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.deploy.gke_stage import FAKE, ROOT, Ran, Stage, make_stage

KUSTOMIZE = next((str(p) for p in (ROOT / ".tools/bin/kustomize",) if p.exists()), shutil.which("kustomize"))
OVERLAY_THERE = (ROOT / "deploy/k8s/overlays/gke-gpu/kustomization.yaml").exists()


@pytest.fixture
def real(tmp_path: Path) -> Stage:
    if not OVERLAY_THERE:
        pytest.skip("deploy/k8s/overlays/gke-gpu is not there")
    if KUSTOMIZE is None:
        pytest.skip("no kustomize: run scripts/deploy_tools")
    stage = make_stage(tmp_path)
    shutil.rmtree(stage.root / "deploy")
    shutil.copytree(ROOT / "deploy", stage.root / "deploy", ignore=shutil.ignore_patterns(".terraform"))
    return stage


def rendered(stage: Stage, *more: str) -> tuple[Ran, list[dict]]:
    """What is applied from a file, caught by a kubectl that copies it."""
    kubectl = stage.base / "bin/kubectl"
    kubectl.unlink()
    catch = 'for f; do case $f in */fleet.yaml) cp "$f" "$FAKES/got" ;; esac; done'
    kubectl.write_text(f'#!/bin/sh\n{catch}\nexec {stage.base}/kubectl "$@"\n')
    kubectl.chmod(0o755)
    (stage.base / "kubectl").symlink_to(FAKE)
    ran = stage.deploy(*more, KUSTOMIZE=str(KUSTOMIZE))
    assert ran.code == 0, ran.err
    return ran, [found for found in yaml.safe_load_all((stage.base / "got").read_text()) if found]


def test_the_real_overlay_gets_this_fleets_names(real: Stage) -> None:
    ran, objects = rendered(real, "--set", "accelerator=nvidia-h100-80gb", "--namespace", "other")
    text = yaml.safe_dump_all(objects)
    images = set(re.findall(r"image: (\S+)", text))
    assert images == {f"eu/x/kvfleet-{name}:t1" for name in ("control", "nats", "worker-gpu")}
    for left in ("PROJECT", "REGION", "192.0.2.1", "nvidia-l4", "from settings"):
        assert not re.search(rf"\b{re.escape(left)}\b", text), f"{left} is still there"
    by_name = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    assert by_name["Service", "ingress"]["spec"]["loadBalancerIP"] == "203.0.113.10"
    assert {o["metadata"]["namespace"] for o in objects if "namespace" in o["metadata"]} == {"other"}
    waited = {call[-2] for call in ran.calls if "rollout" in call or "wait" in call}
    assert len(waited) == 6
    kinds = {"statefulset": "StatefulSet", "deployment": "Deployment", "job": "Job"}
    for name in waited:
        kind, _, name = name.partition("/")
        assert (kinds[kind], name) in by_name


def test_every_secret_that_pods_read_is_made(real: Stage) -> None:
    ran, objects = rendered(real)
    made: dict[str, set[str]] = {}
    for call in ran.calls:
        if "secret" in call and "create" in call:
            name = call[call.index("secret") + 2]
            made[name] = {word.split("=")[1] for word in call if word.startswith("--from-file=")}
            if "tls" in call:
                made[name] |= {"tls.crt", "tls.key"}
    wanted: dict[str, set[str]] = {}

    def look(value: object) -> None:
        if isinstance(value, dict):
            for key in ("secret", "secretRef"):
                if isinstance(found := value.get(key), dict):
                    keys = {item["key"] for item in found.get("items", [])}
                    if not found.get("optional"):
                        wanted.setdefault(found.get("name") or found["secretName"], set()).update(keys)
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look([o for o in objects if o["kind"] in ("StatefulSet", "Deployment", "Job")])
    assert set(wanted) == set(made)
    for name, keys in wanted.items():
        assert keys <= made[name], name


def test_the_accelerator_of_the_overlay_is_terraforms(real: Stage) -> None:
    variables = (ROOT / "deploy/terraform/gke/variables.tf").read_text()
    default = re.search(r'variable "gpu_type".*?default\s*=\s*"([^"]+)"', variables, re.DOTALL)
    assert default is not None
    settings = (ROOT / "deploy/k8s/overlays/gke-gpu/settings.yaml").read_text()
    assert f"accelerator: {default[1]}" in settings
