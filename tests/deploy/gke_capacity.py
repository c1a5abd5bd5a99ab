"""What GKE leaves of a node to pods, and whether pods fit the pools that Terraform makes: by Google's published rules
(https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes), and not by a node that was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.deploy.k8s_objects import Object, Pod, of_kind, pods

GPU = "nvidia.com/gpu"
DISK = "ephemeral-storage"
UNITS = {"Mi": 2.0**-10, "Gi": 1.0, "Ti": 2.0**10}
MACHINES = {"n2-standard-8": (8, 32.0), "g2-standard-12": (12, 48.0)}  # CPUs, GiB
MEMORY_KEPT = ((4.0, 0.25), (4.0, 0.20), (8.0, 0.10), (112.0, 0.06), (math.inf, 0.02))  # of each further part
CPU_KEPT = ((1, 0.06), (1, 0.01), (2, 0.005), (math.inf, 0.0025))
PARTITIONED = 0.94  # of a boot disk that the system's partitions and the file system leave
AGENTS = {"cpu": 0.7, "memory": 1.5}  # of a node's requests: those of GKE's own pods there, generously


@dataclass(frozen=True)
class Pool:
    """Machines of one kind, with as many of each resource for pods as a node leaves them."""

    name: str
    node: dict[str, float]
    fewest: int
    most: int


def allocatable_disk(gib: float) -> float:
    """GiB for pods of a boot disk of so many."""
    return PARTITIONED * gib * 0.9 - min(0.5 * gib, 6 + 0.35 * gib, 100.0)


def pool(name: str, machine: str, disk_gib: float, counts: dict[str, int], gpus: int = 0) -> Pool:
    cpus, memory = MACHINES[machine]
    node = {
        "cpu": cpus - _kept(cpus, CPU_KEPT) - AGENTS["cpu"],
        "memory": memory - _kept(memory, MEMORY_KEPT) - 0.1 - AGENTS["memory"],  # 100 MiB: where eviction begins
        DISK: allocatable_disk(disk_gib),
        GPU: gpus,
    }
    return Pool(name, node, counts["min"], counts["max"])


def _kept(whole: float, rates: Sequence[tuple[float, float]]) -> float:
    kept = 0.0
    for part, rate in rates:
        kept += min(part, whole) * rate
        whole = max(0.0, whole - part)
    return kept


def amount(text: str) -> float:
    """CPUs, GiB, or a number."""
    if text.endswith("m"):
        return int(text[:-1]) / 1000
    return float(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else float(text)


def requests(pod: Pod) -> dict[str, float]:
    found: dict[str, float] = {}
    for container in pod.containers:
        for name, text in container["resources"]["requests"].items():
            found[name] = found.get(name, 0.0) + amount(text)
    return found


def replicas(pod: Pod, objects: Sequence[Object]) -> tuple[int, int]:
    """Fewest and most: by whoever scales it, or as it says itself."""
    for scaler in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        spec = scaler["spec"]
        if (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) == tuple(pod.name.split("/")):
            return (
                spec.get("minReplicas") or spec["minReplicaCount"],
                spec.get("maxReplicas") or spec["maxReplicaCount"],
            )
    count = pod.owner["spec"].get("replicas", 1)
    return count, count


def capacity_problems(objects: Sequence[Object], cpu: Pool, gpu: Pool) -> list[str]:
    """Pods that fit no node of their pool, and pools that do not hold all pods: at first, and at their most."""
    found = []
    for at, where in ((0, cpu), (1, cpu), (0, gpu), (1, gpu)):
        wanted = []
        for pod in pods(objects):
            asked = requests(pod)
            if (GPU in asked) != (where is gpu):
                continue
            lacking = [name for name, value in asked.items() if value > where.node[name]]
            found += [f"{pod.name} asks for more {name} than a node of {where.name} has" for name in lacking]
            if not lacking:
                wanted += [(pod.name, asked)] * replicas(pod, objects)[at]
        nodes = packed(wanted, where)
        # a GPU pool grows with its workers; CPU nodes that are there from the start hold all that starts
        limit = where.most if at or where is gpu else where.fewest
        if nodes > limit:
            found.append(f"{where.name}: {nodes} nodes are needed, there are {limit}")
    return list(dict.fromkeys(found))


def packed(wanted: Sequence[tuple[str, dict[str, float]]], where: Pool) -> int:
    """Nodes that first fit needs, largest first; NATS servers want a node each."""
    nodes: list[tuple[dict[str, float], set[str]]] = []
    for name, asked in sorted(wanted, key=lambda one: -max(v / where.node[k] for k, v in one[1].items())):
        for free, there in nodes:
            apart = name == "StatefulSet/nats" and name in there
            if not apart and all(free[key] >= value for key, value in asked.items()):
                break
        else:
            free, there = dict(where.node), set()
            nodes.append((free, there))
        for key, value in asked.items():
            free[key] -= value
        there.add(name)
    return len(nodes)
