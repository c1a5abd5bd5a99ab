"""The rules that operators of Prometheus take are those of deploy/observability, which have tests of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.k8s_objects import Object, named
from tests.deploy.k8s_render import K8S, ROOT, render_combination

SOURCE = ROOT / "deploy" / "observability" / "rules" / "kvfleet.yml"


@pytest.mark.parametrize(("component", "kind"), [("monitoring", "PrometheusRule"), ("monitoring-gke", "Rules")])
def test_the_groups_are_equal(component: str, kind: str, tmp_path: Path) -> None:
    objects = render_combination((component,), tmp_path)
    wanted = yaml.safe_load(SOURCE.read_text())["groups"]
    if kind == "Rules":  # Google's wants to be told what Prometheus takes from its own configuration
        wanted = [{"interval": "30s", **group} for group in wanted]
    (written,) = (K8S / "components" / component).glob("*rule*.yaml")
    assert yaml.safe_load(written.read_text())["spec"]["groups"] == wanted, "run deploy/k8s/make_rules"
    # kustomize writes a folded text with an empty line more, which means nothing to Prometheus
    assert _folded(named(objects, kind, "kvfleet")["spec"]["groups"]) == _folded(wanted)
    assert wanted


def _folded(groups: list[Object]) -> list[Object]:
    return [
        {**group, "rules": [{**rule, "expr": " ".join(rule["expr"].split())} for rule in group["rules"]]}
        for group in groups
    ]


def test_nothing_is_left_to_write() -> None:
    done = subprocess.run([sys.executable, K8S / "make_rules", "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
