"""Whatever an object names is there: ConfigMaps, keys of Secrets, accounts, ports, selected pods, scale targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.deploy.k8s_objects import Object, Pod, named, of_kind, pods, selects, title

# Made from the folder that `kvfleet secrets` writes (README.md), never stored: name -> keys. None: any.
SECRETS: dict[str, set[str] | None] = {
    "kvfleet-nats-tls": {"tls.crt", "tls.key", "ca.crt"},
    "kvfleet-node-tls": {"tls.crt", "tls.key", "ca.crt"},
    "kvfleet-nkeys": {f"{user}.seed" for user in ("admin", "ingress", "placement", "worker", "vault", "sys")},
    "kvfleet-nats-nkeys": None,
    "kvfleet-fleet-key": {"fleet.key"},
    "kvfleet-api-keys": {"api-keys.toml"},
    "kvfleet-ingress-tls": {"tls.crt", "tls.key"},
    "kvfleet-hub-token": {"token"},
}
# Fields of a Service that the API server refuses in others.
OF_BALANCERS = {
    "externalTrafficPolicy": ("LoadBalancer", "NodePort"),
    "loadBalancerIP": ("LoadBalancer",),
    "loadBalancerSourceRanges": ("LoadBalancer",),
}


def reference_problems(objects: Sequence[Object]) -> list[str]:
    return [
        *_twice(objects),
        *(problem for pod in pods(objects) for problem in _pod(pod, objects)),
        *_services(objects),
        *_budgets(objects),
        *_scaling(objects),
        *_gateways(objects),
        *_monitors(objects),
    ]


def _twice(objects: Sequence[Object]) -> Iterator[str]:
    titles = [title(one) for one in objects]
    yield from (f"{name} is there twice" for name in sorted(set(titles)) if titles.count(name) > 1)


def _there(objects: Sequence[Object], kind: str, name: str) -> bool:
    return any(one["kind"] == kind and one["metadata"]["name"] == name for one in objects)


def _pod(pod: Pod, objects: Sequence[Object]) -> Iterator[str]:
    owner = pod.owner["spec"]
    if "selector" in owner and not selects(owner["selector"], pod.labels):
        yield f"{pod.name}: its selector does not match its pods' labels"
    for kind, name in (
        ("ServiceAccount", pod.spec.get("serviceAccountName", "default")),
        ("PriorityClass", pod.spec.get("priorityClassName", "")),
        *([("Service", owner.get("serviceName", ""))] if pod.owner["kind"] == "StatefulSet" else []),
    ):
        if not _there(objects, kind, name):
            yield f"{pod.name}: no {kind} {name!r}"
    claims = {claim["metadata"]["name"] for claim in owner.get("volumeClaimTemplates", [])}
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    for volume in volumes.values():
        yield from (f"{pod.name}: volume {volume['name']}: {told}" for told in _volume(volume, objects))
    used = {mount["name"] for one in pod.containers for mount in one.get("volumeMounts", [])}
    yield from (f"{pod.name}: mounts {name!r}, which it has no volume of" for name in used - set(volumes) - claims)
    yield from (f"{pod.name}: nobody mounts {name!r}" for name in (set(volumes) | claims) - used)
    for container in pod.containers:
        for source in container.get("envFrom", []):
            yield from (f"{pod.name}: envFrom: {told}" for told in _source(source, objects))
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield from (f"{pod.name}: env: {told}" for told in _secret(reference["name"], [reference["key"]]))
        yield from _probe_ports(pod, container)


def _probe_ports(pod: Pod, container: Object) -> Iterator[str]:
    ports = {port["name"] for port in container.get("ports", [])}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container.get(kind, {}).get("httpGet", {}).get("port")
        if port is not None and port not in ports:
            yield f"{pod.name}: {kind}: no port {port!r} by name"


def _volume(volume: Object, objects: Sequence[Object]) -> Iterator[str]:
    if secret := volume.get("secret"):
        yield from _secret(secret["secretName"], [item["key"] for item in secret.get("items", [])])
    if "configMap" in volume:
        yield from _source({"configMap": volume["configMap"]}, objects)
    for source in volume.get("projected", {}).get("sources", []):
        yield from _source(source, objects)
    if "persistentVolumeClaim" in volume:
        yield f"claims {volume['persistentVolumeClaim']['claimName']!r}, which nobody makes"


def _source(source: Object, objects: Sequence[Object]) -> Iterator[str]:
    """Of a projected volume or of an environment."""
    if secret := source.get("secret") or source.get("secretRef"):
        yield from _secret(secret["name"], [item["key"] for item in secret.get("items", [])])
    if wanted := source.get("configMap") or source.get("configMapRef"):
        if not _there(objects, "ConfigMap", wanted["name"]):
            yield f"no ConfigMap {wanted['name']!r}"
            return
        data = named(objects, "ConfigMap", wanted["name"]).get("data", {})
        missing = [item["key"] for item in wanted.get("items", []) if item["key"] not in data]
        yield from (f"ConfigMap {wanted['name']} has no {key!r}" for key in missing)


def _secret(name: str, keys: Sequence[str]) -> Iterator[str]:
    if name not in SECRETS:
        yield f"Secret {name!r} is none of those that are documented"
        return
    known = SECRETS[name]
    yield from (f"Secret {name} has no {key!r}" for key in keys if known is not None and key not in known)


def _services(objects: Sequence[Object]) -> Iterator[str]:
    for service in of_kind(objects, "Service"):
        behind = [pod for pod in pods(objects) if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        if not behind:
            yield f"{title(service)}: no pod is behind it"
        kind = service["spec"].get("type", "ClusterIP")
        for field, kinds in OF_BALANCERS.items():
            if field in service["spec"] and kind not in kinds:
                yield f"{title(service)}: {field} has no place in a {kind}"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            for pod in behind:
                if target not in pod.ports() and target not in pod.ports().values():
                    yield f"{title(service)}: {pod.name} has no port {target!r}"


def _budgets(objects: Sequence[Object]) -> Iterator[str]:
    budgets = of_kind(objects, "PodDisruptionBudget")
    for pod in pods(objects):
        if pod.owner["kind"] == "Job":
            continue
        count = sum(selects(budget["spec"]["selector"], pod.labels) for budget in budgets)
        if count != 1:  # evictions of a pod with two are refused outright
            yield f"{pod.name}: {count} PodDisruptionBudgets"
    for budget in budgets:
        if not any(selects(budget["spec"]["selector"], pod.labels) for pod in pods(objects)):
            yield f"{title(budget)}: selects no pod"


def _scaling(objects: Sequence[Object]) -> Iterator[str]:
    scaled: dict[str, list[str]] = {}
    for scaler in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        wanted = scaler["spec"]["scaleTargetRef"]
        target = f"{wanted['kind']}/{wanted['name']}"
        scaled.setdefault(target, []).append(title(scaler))
        if not _there(objects, wanted["kind"], wanted["name"]):
            yield f"{title(scaler)}: no {target}"
        elif "replicas" in named(objects, wanted["kind"], wanted["name"])["spec"]:
            yield f"{target} says how many replicas, and so does {title(scaler)}"
        for trigger in scaler["spec"].get("triggers", []):
            wanted = trigger.get("authenticationRef")
            if wanted and not _there(objects, wanted["kind"], wanted["name"]):
                yield f"{title(scaler)}: no {wanted['kind']} {wanted['name']!r}"
    yield from (f"{target} is scaled by {' and '.join(by)}" for target, by in scaled.items() if len(by) > 1)


def _gateways(objects: Sequence[Object]) -> Iterator[str]:
    for policy in of_kind(objects, "GCPBackendPolicy", "HealthCheckPolicy"):
        wanted = policy["spec"]["targetRef"]
        if not _there(objects, wanted["kind"], wanted["name"]):
            yield f"{title(policy)}: no {wanted['kind']} {wanted['name']!r}"
    for route in of_kind(objects, "HTTPRoute"):
        for parent in route["spec"]["parentRefs"]:
            if not _there(objects, "Gateway", parent["name"]):
                yield f"{title(route)}: no Gateway {parent['name']!r}"
        for backend in (one for rule in route["spec"]["rules"] for one in rule["backendRefs"]):
            if not _there(objects, "Service", backend["name"]):
                yield f"{title(route)}: no Service {backend['name']!r}"
            elif backend["port"] not in [
                port["port"] for port in named(objects, "Service", backend["name"])["spec"]["ports"]
            ]:
                yield f"{title(route)}: Service {backend['name']} has no port {backend['port']}"
    for gateway in of_kind(objects, "Gateway"):
        for listener in gateway["spec"]["listeners"]:
            for reference in listener.get("tls", {}).get("certificateRefs", []):
                yield from (f"{title(gateway)}: {told}" for told in _secret(reference["name"], ["tls.crt", "tls.key"]))


def _monitors(objects: Sequence[Object]) -> Iterator[str]:
    services = of_kind(objects, "Service")
    for monitor in of_kind(objects, "ServiceMonitor"):
        seen = [one for one in services if selects(monitor["spec"]["selector"], one["metadata"].get("labels", {}))]
        ports = {port["name"] for service in seen for port in service["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in ports:
                yield f"{title(monitor)}: no Service that it selects has a port {endpoint['port']!r}"
    for monitor in of_kind(objects, "PodMonitoring"):
        for endpoint in monitor["spec"]["endpoints"]:
            seen_pods = [pod for pod in pods(objects) if selects(monitor["spec"]["selector"], pod.labels)]
            if not seen_pods or any(endpoint["port"] not in pod.ports() for pod in seen_pods):
                yield f"{title(monitor)}: not every pod that it selects has a port {endpoint['port']!r}"
