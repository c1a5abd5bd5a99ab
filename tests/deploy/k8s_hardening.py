"""What every pod of the fleet must be: no root, nothing to write to but its volumes, no token, no privilege."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.deploy.k8s_objects import Object, Pod, of_kind, pods, selects, title

USER = 10001


def hardening_problems(objects: Sequence[Object]) -> list[str]:
    found = [problem for pod in pods(objects) for problem in _pod(pod)]
    for account in of_kind(objects, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            found.append(f"{title(account)}: brings a token")
    for one in objects:
        if one["kind"] in ("Secret", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
            found.append(f"{title(one)}: belongs in no repository, or is a right that no part of the fleet needs")
    return found


def _pod(pod: Pod) -> Iterator[str]:
    yield from (f"{pod.name}: {told}" for told in _whole(pod))
    for container in pod.containers:
        yield from (f"{pod.name}/{container['name']}: {told}" for told in _container(container))
        for mount in container.get("volumeMounts", []):
            volume = next((one for one in pod.spec.get("volumes", []) if one["name"] == mount["name"]), {})
            if {"secret", "configMap", "projected"} & set(volume) and not mount.get("readOnly"):
                yield f"{pod.name}/{container['name']}: {mount['name']} could be written to"


def _whole(pod: Pod) -> Iterator[str]:
    spec = pod.spec
    context = spec.get("securityContext", {})
    wanted = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    for key, value in wanted.items():
        if context.get(key) != value:
            yield f"securityContext.{key} is {context.get(key)!r}"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "gets a token of its service account"
    if spec.get("enableServiceLinks") is not False:
        yield "gets variables of every Service: one named `kvfleet` would set KVFLEET_PORT"
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(key):
            yield key
    for volume in spec.get("volumes", []):
        if "hostPath" in volume:
            yield f"volume {volume['name']} is the node's"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']} could fill the node's disk"
    if "priorityClassName" not in spec:
        yield "no priority"
    if pod.owner["kind"] != "Job":
        spreads = spec.get("topologySpreadConstraints", [])
        if {one["topologyKey"] for one in spreads} < {"topology.kubernetes.io/zone"}:
            yield "is not spread over zones"
        if not all(selects(one["labelSelector"], pod.labels) for one in spreads):
            yield "spreads other pods"
        if not any(one["topologyKey"] == "kubernetes.io/hostname" for one in (*spreads, *_apart(pod))):
            yield "is not kept apart on nodes"


def _apart(pod: Pod) -> list[Object]:
    anti = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
    terms = [one["podAffinityTerm"] for one in anti.get("preferredDuringSchedulingIgnoredDuringExecution", [])]
    return [term for term in terms if selects(term["labelSelector"], pod.labels)]


def _container(container: Object) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context != {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }:
        yield f"securityContext is {context!r}"
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= set(resources.get("requests", {})):
        yield "asks for no CPU or memory"
    if "memory" not in resources.get("limits", {}):
        yield "its memory has no limit"
    image = container["image"]
    tag = image.rpartition("/")[2].partition(":")[2]  # a registry may have a port
    if "@sha256:" not in image and tag in ("", "latest"):
        yield f"image {image} has no tag, or one that moves"
