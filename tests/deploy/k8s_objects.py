"""What the checks ask of rendered objects: workloads with their pods, and what a container finds in its environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
Labels = dict[str, str]

WORKLOADS = ("Deployment", "StatefulSet", "Job", "DaemonSet")
COMPONENT = "app.kubernetes.io/component"


@dataclass(frozen=True)
class Pod:
    """Of a workload: what each of its pods is like."""

    owner: Object

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def labels(self) -> Labels:
        return dict(self.owner["spec"]["template"]["metadata"].get("labels", {}))

    @property
    def component(self) -> str:
        return self.labels.get(COMPONENT, "")

    @property
    def spec(self) -> Object:
        found: Object = self.owner["spec"]["template"]["spec"]
        return found

    @property
    def main(self) -> Object:
        """Its first container that is no sidecar."""
        first: Object = self.spec["containers"][0]
        return first

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for one in self.containers for port in one.get("ports", [])}


def pods(objects: Iterable[Object]) -> list[Pod]:
    return [Pod(one) for one in objects if one["kind"] in WORKLOADS]


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: Iterable[Object], kind: str, name: str) -> Object:
    """Raises LookupError."""
    for one in objects:
        if one["kind"] == kind and one["metadata"]["name"] == name:
            return one
    raise LookupError(f"no {kind}/{name}")


def title(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def selects(selector: Object | None, labels: Labels) -> bool:
    """A label selector of any API: matchLabels and matchExpressions. None selects nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_holds(rule, labels) for rule in selector.get("matchExpressions", []))


def _holds(rule: Object, labels: Labels) -> bool:
    value, wanted = labels.get(rule["key"]), rule.get("values", [])
    match rule["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(rule["operator"])


def environment(container: Object, objects: Sequence[Object]) -> dict[str, str | None]:
    """As the process sees it; None for what only the cluster knows. Secrets in `envFrom` are left out."""
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", []):
        if reference := source.get("configMapRef"):
            found |= named(objects, "ConfigMap", reference["name"]).get("data", {})
    for variable in container.get("env", []):
        found[variable["name"]] = variable.get("value")
    return found


def strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every string in it with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from strings(inner, f"{path}[{position}]")
    elif isinstance(value, str):
        yield path, value
