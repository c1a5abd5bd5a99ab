"""What a pod of a vLLM server and its worker must be: the server has the flags that a worker demands, can be asked from
its own pod alone, and ends after its worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.vllm.server_facts import SAMPLERS, EventAddresses, missing_flags
from kvservice.byte_size import parse_bytes
from tests.deploy.k8s_objects import Object, Pod, environment, pods
from tests.deploy.k8s_processes import CLOSE_S, PROBES, settings_of

GPU = "nvidia.com/gpu"
LOAD_S = 1800  # to fetch, load and compile
VLLM_S = 10.0  # it takes 2 or 3 to end
BESIDE_BYTES = 2 << 30  # beside blocks
NAMES = ("KVFLEET_MODEL", "KVFLEET_SERVED_MODEL_NAME")


def vllm_problems(objects: Sequence[Object]) -> list[str]:
    return [
        f"{pod.name}: {problem}"
        for pod in pods(objects)
        for server in pod.containers
        if "kvfleet-vllm" in server["image"]
        for problem in _pair(pod, server, objects)
    ]


def flags_of(server: Object) -> dict[str, str | None]:
    """By name, without those that only have a value."""
    told = [one.partition("=") for one in server["args"] if one.startswith("--")]
    return {name: value if equals else None for name, equals, value in told}


def told_by(flags: dict[str, str | None]) -> dict[str, Any]:
    """What the connector of a server with these flags would tell a worker."""
    events = json.loads(flags.get("--kv-events-config") or "{}")
    return {
        "scheduling_policy": flags.get("--scheduling-policy"),
        "async_scheduling": "--no-async-scheduling" not in flags,
        "max_logprobs": int(flags.get("--max-logprobs") or 20),
        "logits_processors": [flags.get("--logits-processors")],
        "kv_events": {**events, "enabled": events.get("enable_kv_cache_events")},
    }


def _pair(pod: Pod, server: Object, objects: Sequence[Object]) -> Iterator[str]:
    worker = pod.main
    variables = environment(worker, objects)
    settings = settings_of("worker", variables)
    assert isinstance(settings, WorkerSettings)
    flags = flags_of(server)
    yield from _order(pod, server, settings)
    yield from _flags(flags, server, variables)
    yield from _addresses(flags, server, settings)
    yield from _shared(pod, server, worker, settings)
    for probe in PROBES:
        health = ["python3", "-m", "kvservice.health", "--port", flags.get("--port"), "--path", "/health"]
        if server.get(probe, {}).get("exec", {}).get("command") != health:
            yield f"{probe} is not {health}: the kubelet cannot reach the pod's loopback"
    start = server.get("startupProbe", {})
    if start.get("periodSeconds", 10) * start.get("failureThreshold", 3) < LOAD_S:
        yield f"has less than {LOAD_S} s to load"
    gpus = [one["resources"]["limits"].get(GPU) for one in (server, worker)]
    if not gpus[0] or gpus[1]:
        yield f"GPUs of vLLM and its worker are {gpus}"


def _order(pod: Pod, server: Object, settings: WorkerSettings) -> Iterator[str]:
    if server not in pod.spec.get("initContainers", []) or server.get("restartPolicy") != "Always":
        yield "vLLM is no sidecar: it would end while its worker drains"
    if settings.engine != "vllm":
        yield f"the worker's engine is {settings.engine!r}"
    needed, given = settings.drain_s + CLOSE_S + VLLM_S, pod.spec["terminationGracePeriodSeconds"]
    if given < needed:
        yield f"worker and vLLM may take {needed:g} s to end, and are given {given}"


def _flags(flags: dict[str, str | None], server: Object, variables: dict[str, str | None]) -> Iterator[str]:
    yield from (f"vLLM lacks {flag}" for flag in missing_flags(told_by(flags)))
    if "--enable-scale-out" not in flags:
        yield "vLLM lacks --enable-scale-out"
    connector = json.loads(flags.get("--kv-transfer-config") or "{}")
    if (connector.get("kv_connector"), connector.get("kv_role")) != ("KvfleetConnector", "kv_both"):
        yield f"the connector is {connector}"
    for module in (connector.get("kv_connector_module_path", ""), *(one.partition(":")[0] for one in SAMPLERS)):
        if not module or find_spec(module) is None:
            yield f"there is no module {module!r}"
    told = (server["args"][0], flags.get("--served-model-name"))
    if told != tuple(f"$({name})" for name in NAMES):
        yield f"vLLM is told {told}, not what the worker is"
    given = {one["name"]: one.get("valueFrom", {}).get("configMapKeyRef", {}) for one in server["env"]}
    for name in NAMES:
        if given.get(name, {}).get("key") != name or not variables.get(name):
            yield f"vLLM has no {name} of its worker's"


def _addresses(flags: dict[str, str | None], server: Object, settings: WorkerSettings) -> Iterator[str]:
    asked = urlsplit(settings.engine_url)
    if flags.get("--host") != "127.0.0.1" or server.get("ports"):
        yield "others may ask vLLM"
    if (asked.hostname, str(asked.port)) != ("127.0.0.1", flags.get("--port")):
        yield f"the worker asks at {settings.engine_url}"
    if (events := flags.get("--kv-events-config")) is None:
        return
    at = EventAddresses.of(json.loads(events), settings.engine_url)
    if not at.binds or {urlsplit(one).hostname for one in (at.endpoint, at.replay)} != {"127.0.0.1"}:
        yield f"KV events come over {at}"


def _shared(pod: Pod, server: Object, worker: Object, settings: WorkerSettings) -> Iterator[str]:
    mounts = [{one["mountPath"]: one for one in container["volumeMounts"]} for container in (server, worker)]
    shared = {str(settings.runtime_dir): "sockets", "/var/lib/kvfleet": "model files", "/dev/shm": "blocks"}
    for path, what in shared.items():
        both = [one.get(path, {}) for one in mounts]
        if not both[0] or both[0]["name"] != both[1].get("name") or any(one.get("readOnly") for one in both):
            yield f"the two share no volume for {what}"
    volumes = {one["name"]: one for one in pod.spec["volumes"]}
    shm = volumes.get(mounts[0].get("/dev/shm", {}).get("name", ""), {})
    if shm.get("emptyDir", {}).get("medium") != "Memory":
        yield "/dev/shm has the 64 MiB of every container"
        return
    limits = [one["resources"]["limits"]["memory"] for one in (server, worker)]
    for room in (shm["emptyDir"]["sizeLimit"], *limits):
        if settings.host_bytes is None or parse_bytes(f"{room}B") < settings.host_bytes + BESIDE_BYTES:
            yield f"{settings.host_bytes} bytes of blocks do not fit {room}"
