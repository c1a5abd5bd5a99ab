"""The chart that has NATS's own chart beside it. That one cannot be had offline: a chart that writes down the values
it is given stands in for it, and a real nats-server reads the configuration that it would make of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfleet.cli.embedded.embedded_nats import binary
from kvfleet.cli.secrets.secrets_folder import WantedSecrets, fill
from tests.deploy.helm_render import CHART, run_helm, template
from tests.deploy.k8s_objects import Object, named, of_kind, pods, selects

TOGETHER = CHART.parent / "kvfleet-nats"
STAND_IN = {
    "Chart.yaml": "apiVersion: v2\nname: nats\nversion: 1.3.0\n",
    "templates/values.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: values}\n"
    "data:\n  values: {{ .Values | toJson | quote }}\n",
}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(TOGETHER, tmp_path_factory.mktemp("charts") / "kvfleet-nats")
    shutil.copytree(CHART, folder / "charts/kvfleet")
    for name, text in STAND_IN.items():
        file = folder / "charts/nats" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def given(objects: list[Object]) -> Any:
    return json.loads(named(objects, "ConfigMap", "values")["data"]["values"])


def test_the_fleet_makes_no_servers_and_has_the_accounts_for_those_of_the_other_chart(chart: Path) -> None:
    objects = template(chart=chart)
    assert "nats" not in {pod.component for pod in pods(objects)}
    assert named(objects, "ConfigMap", "kvfleet-nats-fleet")["data"]["accounts-nkeys.conf"]
    done = run_helm("lint", "--strict", chart)
    assert done.returncode == 0, done.stdout


def test_the_other_chart_may_be_left_out(chart: Path) -> None:
    objects = template("--set=nats.enabled=false", "--set=kvfleet.nats.servers=own", chart=chart)
    assert not [one for one in of_kind(objects, "ConfigMap") if one["metadata"]["name"] == "values"]
    assert "nats" in {pod.component for pod in pods(objects)}


def test_its_pods_are_found_by_name_and_by_policies(chart: Path) -> None:
    objects = template(chart=chart)
    values = given(objects)
    settings = named(objects, "ConfigMap", "kvfleet-nats-client")["data"]
    servers = [f"tls://{values['fullnameOverride']}-{one}.{values['headlessService']['name']}:4222" for one in range(3)]
    assert settings["KVFLEET_NATS_URL"] == ",".join(servers)
    labels = {"app.kubernetes.io/name": values["nameOverride"], "app.kubernetes.io/component": "nats"}
    assert selects(named(objects, "NetworkPolicy", "nats")["spec"]["podSelector"], labels)
    (peer,) = named(objects, "NetworkPolicy", "worker")["spec"]["egress"][0]["to"]
    assert selects(peer["podSelector"], labels)


def test_a_server_takes_the_configuration(chart: Path, tmp_path: Path) -> None:
    """As NATS's chart makes it (its files/config), with the secrets of a fleet."""
    objects = template(chart=chart)
    values = given(objects)
    (volume,) = [one["value"] for one in values["podTemplate"]["patch"]]
    data = named(objects, "ConfigMap", volume["configMap"]["name"])["data"]
    for item in volume["configMap"]["items"]:
        file = tmp_path / "kvfleet-nats" / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(data[item["key"]])
    fill(tmp_path / "secrets", WantedSecrets(), datetime.now(UTC))
    told = values["config"]
    config = {
        "server_name": "<< $POD_NAME >>",
        "tls": tls(told["nats"]["tls"], tmp_path),
        "cluster": {"port": 6222, "tls": tls(told["cluster"]["tls"], tmp_path), **told["cluster"]["merge"]},
        "jetstream": {
            "store_dir": str(tmp_path),
            "max_file_store": f"<< {told['jetstream']['fileStore']['maxSize']} >>",
        },
        **told["merge"],
    }
    text = re.sub(r'".*\$include": "(.*)",?', r"include \1;", json.dumps(config, indent=2))
    (tmp_path / "nats-config").mkdir()
    (tmp_path / "nats-config/nats.conf").write_text(re.sub(r'"<<\s+(.*)\s+>>"', r"\1", text))
    keys = dict(line.split("=", 1) for line in (tmp_path / "secrets/nats.env").read_text().splitlines() if "=" in line)
    done = subprocess.run(
        [binary(), "--config", tmp_path / "nats-config/nats.conf", "-t"],
        env={**keys, "POD_NAME": "nats-0"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def tls(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    secrets = folder / "secrets"
    files = {"cert_file": f"{secrets}/nats.crt", "key_file": f"{secrets}/nats.key", "ca_file": f"{secrets}/ca.crt"}
    assert told["merge"]["ca_file"].endswith("/ca.crt")
    return {**told["merge"], **files}


def test_values_are_those_of_the_fleets_own_servers() -> None:
    values = yaml.safe_load((TOGETHER / "values.yaml").read_text())["nats"]
    own = named(template(), "StatefulSet", "nats")["spec"]
    spec, pod = own["template"]["spec"], values["podTemplate"]["merge"]["spec"]
    for key in ("priorityClassName", "terminationGracePeriodSeconds", "automountServiceAccountToken"):
        assert pod[key] == spec[key]
    assert pod["securityContext"].items() <= spec["securityContext"].items()
    (container,) = spec["containers"]
    assert values["container"]["merge"]["resources"] == container["resources"]
    assert values["container"]["merge"]["envFrom"] == container["envFrom"]
    size = own["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert values["config"]["jetstream"]["fileStore"]["pvc"]["size"] == size
    mine = values["podTemplate"]["patch"][0]["value"]["configMap"]["items"]
    theirs = [one["configMap"] for volume in spec["volumes"] for one in volume.get("projected", {}).get("sources", [])]
    assert [item for item in mine if item not in theirs[1]["items"]] == []
