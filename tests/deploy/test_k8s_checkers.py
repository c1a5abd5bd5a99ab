"""The checks find what is broken on purpose: one fault each, in a copy of what the overlay renders to."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.deploy.k8s_hardening import hardening_problems
from tests.deploy.k8s_objects import Object, named
from tests.deploy.k8s_processes import process_problems
from tests.deploy.k8s_references import reference_problems
from tests.deploy.k8s_render import render
from tests.deploy.k8s_schemas import schema_problems

Objects = list[Object]
Break = Callable[[Objects], Any]


def pod(objects: Objects, kind: str, name: str) -> Object:
    spec: Object = named(objects, kind, name)["spec"]["template"]["spec"]
    return spec


def container(objects: Objects, kind: str, name: str) -> Object:
    first: Object = pod(objects, kind, name)["containers"][0]
    return first


def worker(objects: Objects) -> Object:
    return container(objects, "StatefulSet", "worker")


def secrets(objects: Objects, name: str) -> list[Object]:
    volumes = pod(objects, "StatefulSet", name)["volumes"]
    found: list[Object] = next(one for one in volumes if one["name"] == "secrets")["projected"]["sources"]
    return found


def settings(objects: Objects, name: str) -> dict[str, str]:
    found: dict[str, str] = next(
        one["data"] for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith(f"{name}-")
    )
    return found


def rename(holder: Object, old: str, new: str) -> None:
    holder[new] = holder.pop(old)


FAULTS: dict[str, tuple[Callable[..., list[str]], Break, str]] = {
    # schemas
    "a field that does not exist": (
        schema_problems,
        lambda o: rename(worker(o), "readinessProbe", "readinesProbe"),
        "StatefulSet/worker: $.spec.template.spec.containers[0]: ",
    ),
    "a port that is no number": (
        schema_problems,
        lambda o: worker(o)["ports"][0].update(containerPort="seven"),
        "containerPort",
    ),
    "a number of replicas in words": (
        schema_problems,
        lambda o: named(o, "Deployment", "placement")["spec"].update(replicas="two"),
        "$.spec.replicas: 'two'",
    ),
    "an API that was removed": (
        schema_problems,
        lambda o: named(o, "HorizontalPodAutoscaler", "ingress").update(apiVersion="autoscaling/v2beta2"),
        "no schema for autoscaling/v2beta2",
    ),
    "a misspelt field of a custom resource": (
        schema_problems,
        lambda o: rename(named(o, "ScaledObject", "worker")["spec"], "minReplicaCount", "minReplicaCnt"),
        "minReplicaC",
    ),
    "a number where KEDA wants text": (
        schema_problems,
        lambda o: named(o, "ScaledObject", "worker")["spec"]["triggers"][0]["metadata"].update(threshold=1),
        "threshold",
    ),
    # references
    "a selector that matches nothing": (
        reference_problems,
        lambda o: named(o, "Deployment", "ingress")["spec"]["selector"]["matchLabels"].update(app="x"),
        "Deployment/ingress: its selector does not match",
    ),
    "a Service before nobody": (
        reference_problems,
        lambda o: named(o, "Service", "ingress")["spec"]["selector"].update({"app.kubernetes.io/component": "igress"}),
        "Service/ingress: no pod is behind it",
    ),
    "a Service on a port that nobody has": (
        reference_problems,
        lambda o: named(o, "Service", "worker")["spec"]["ports"][0].update(targetPort="dataplane"),
        "Service/worker: StatefulSet/worker has no port 'dataplane'",
    ),
    "a probe of a port that does not exist": (
        reference_problems,
        lambda o: worker(o)["livenessProbe"]["httpGet"].update(port="metric"),
        "livenessProbe: no port 'metric'",
    ),
    "a balancer's field in a Service without one": (
        reference_problems,
        lambda o: named(o, "Service", "ingress")["spec"].update(type="ClusterIP"),
        "Service/ingress: externalTrafficPolicy has no place in a ClusterIP",
    ),
    "a balancer's address in a Service without one": (
        reference_problems,
        lambda o: named(o, "Service", "ingress")["spec"].update(type="NodePort"),
        "Service/ingress: loadBalancerIP has no place in a NodePort",
    ),
    "a budget for nobody": (
        reference_problems,
        lambda o: named(o, "PodDisruptionBudget", "vault")["spec"]["selector"]["matchLabels"].update(app="x"),
        "PodDisruptionBudget/vault: selects no pod",
    ),
    "an account that does not exist": (
        reference_problems,
        lambda o: pod(o, "StatefulSet", "nats").update(serviceAccountName="gnats"),
        "no ServiceAccount 'gnats'",
    ),
    "a ConfigMap that does not exist": (
        reference_problems,
        lambda o: worker(o)["envFrom"][0]["configMapRef"].update(name="kvfleet-nats-cleint"),
        "no ConfigMap 'kvfleet-nats-cleint'",
    ),
    "a key that a Secret does not have": (
        reference_problems,
        lambda o: secrets(o, "worker")[0]["secret"]["items"][0].update(key="workers.seed"),
        "Secret kvfleet-nkeys has no 'workers.seed'",
    ),
    "a Secret that nobody makes": (
        reference_problems,
        lambda o: container(o, "StatefulSet", "nats")["envFrom"][0]["secretRef"].update(name="kvfleet-nats-keys"),
        "Secret 'kvfleet-nats-keys' is none of those",
    ),
    "a volume that does not exist": (
        reference_problems,
        lambda o: worker(o)["volumeMounts"][0].update(name="secret"),
        "mounts 'secret'",
    ),
    "a scaler of nothing": (
        reference_problems,
        lambda o: named(o, "ScaledObject", "worker")["spec"]["scaleTargetRef"].update(kind="Deployment"),
        "ScaledObject/worker: no Deployment/worker",
    ),
    "two scalers of one": (
        reference_problems,
        lambda o: named(o, "HorizontalPodAutoscaler", "ingress")["spec"].update(
            scaleTargetRef={"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "worker"}
        ),
        "StatefulSet/worker is scaled by",
    ),
    "a scaler and a number": (
        reference_problems,
        lambda o: named(o, "StatefulSet", "worker")["spec"].update(replicas=4),
        "StatefulSet/worker says how many replicas",
    ),
    "a monitor of a port that does not exist": (
        reference_problems,
        lambda o: named(o, "PodMonitoring", "kvfleet")["spec"]["endpoints"][0].update(port="metric"),
        "PodMonitoring/kvfleet: not every pod",
    ),
    # processes
    "a misspelt variable": (
        process_problems,
        lambda o: rename(settings(o, "kvfleet-worker"), "KVFLEET_DRAIN_S", "KVFLEET_DRAINS"),
        "worker knows no KVFLEET_DRAINS",
    ),
    "another role's variable": (
        process_problems,
        lambda o: settings(o, "kvfleet-placement").update(KVFLEET_DRAIN_S="5"),
        "placement knows no KVFLEET_DRAIN_S",
    ),
    "a value that is none": (
        process_problems,
        lambda o: settings(o, "kvfleet-worker").update(KVFLEET_DEVICE="gpu"),
        "StatefulSet/worker: worker: ('device',)",
    ),
    "a misspelt flag of a service": (
        process_problems,
        lambda o: worker(o).update(args=["worker", "--modle=demo"]),
        "worker knows no --modle",
    ),
    "a misspelt flag of a command": (
        process_problems,
        lambda o: container(o, "Job", "init").update(args=["init", "--replica", "3"]),
        "init: No such option: --replica",
    ),
    "a hook that does not exist": (
        process_problems,
        lambda o: worker(o)["lifecycle"]["preStop"]["exec"].update(command=["kvfleet", "drain", "--pdi", "1"]),
        "preStop: drain: No such option: --pdi",
    ),
    "a probe of a path that does not exist": (
        process_problems,
        lambda o: worker(o)["readinessProbe"]["httpGet"].update(path="/ready"),
        "readinessProbe asks for /ready",
    ),
    "a port that the process does not use": (
        process_problems,
        lambda o: settings(o, "kvfleet-service").update(KVFLEET_METRICS_PORT="9091"),
        "KVFLEET_METRICS_PORT is 9091",
    ),
    "a drain that is cut off": (
        process_problems,
        lambda o: settings(o, "kvfleet-worker").update(KVFLEET_DRAIN_S="100"),
        "worker may take 123 s to end, and is given 120",
    ),
    "a key that is not mounted": (
        process_problems,
        lambda o: settings(o, "kvfleet-placement").update(KVFLEET_FLEET_KEY_FILE="/etc/kvfleet/fleet.key"),
        "nothing is mounted at /etc/kvfleet/fleet.key",
    ),
    "a folder on a read-only root": (
        process_problems,
        lambda o: settings(o, "kvfleet-vault").update(KVFLEET_DISK_DIR="/var/cache/kvfleet"),
        "/var/cache/kvfleet is on no volume",
    ),
    "a worker without its name": (
        process_problems,
        lambda o: worker(o).update(env=[one for one in worker(o)["env"] if one["name"] != "KVFLEET_ID"]),
        "StatefulSet/worker: is not called as its pod is",
    ),
    # hardening
    "root": (
        hardening_problems,
        lambda o: pod(o, "StatefulSet", "worker")["securityContext"].update(runAsUser=0),
        "securityContext.runAsUser is 0",
    ),
    "a root that can be written to": (
        hardening_problems,
        lambda o: worker(o)["securityContext"].update(readOnlyRootFilesystem=False),
        "StatefulSet/worker/worker: securityContext",
    ),
    "a capability": (
        hardening_problems,
        lambda o: worker(o)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
        "IPC_LOCK",
    ),
    "a token": (
        hardening_problems,
        lambda o: pod(o, "Deployment", "ingress").pop("automountServiceAccountToken"),
        "gets a token",
    ),
    "a tag that moves": (
        hardening_problems,
        lambda o: worker(o).update(image="registry:5000/kvfleet-worker"),
        "has no tag",
    ),
    "no limit of memory": (
        hardening_problems,
        lambda o: container(o, "StatefulSet", "vault")["resources"].pop("limits"),
        "its memory has no limit",
    ),
    "a Secret in the repository": (
        hardening_problems,
        lambda o: o.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}}),
        "Secret/x: belongs in no repository",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    check, breaks, told = FAULTS[fault]
    objects = deepcopy(list(render("gke-gpu")))
    assert not [problem for problem in check(objects) if told in problem]
    breaks(objects)
    found = check(objects)
    assert any(told in problem for problem in found), found
