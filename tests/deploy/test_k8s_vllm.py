"""The checks of a vLLM pod find what is broken on purpose: one fault each, in a copy of what the overlay renders to."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.deploy.k8s_objects import Object, named, pods
from tests.deploy.k8s_render import render
from tests.deploy.k8s_vllm import flags_of, vllm_problems

FLAGS = (
    "--enable-scale-out",
    "--scheduling-policy",
    "--max-logprobs",
    "--no-async-scheduling",
    "--logits-processors",
    "--kv-transfer-config",
    "--kv-events-config",
    "--served-model-name",
    "--host",
)


def spec(objects: list[Object]) -> Object:
    found: Object = named(objects, "StatefulSet", "worker")["spec"]["template"]["spec"]
    return found


def vllm(objects: list[Object]) -> Object:
    found: Object = spec(objects)["initContainers"][0]
    return found


def change(objects: list[Object], old: str, new: str) -> None:
    args = [one.replace(old, new) for one in vllm(objects)["args"]]
    assert args != vllm(objects)["args"]
    vllm(objects)["args"] = args


def as_an_equal(objects: list[Object]) -> None:
    server = spec(objects).pop("initContainers")[0]
    server.pop("restartPolicy")
    spec(objects)["containers"].append(server)


FAULTS: dict[str, tuple[Callable[[list[Object]], Any], str]] = {
    "one that ends at once": (lambda o: vllm(o).pop("restartPolicy"), "vLLM is no sidecar"),
    "grace for the worker alone": (
        lambda o: spec(o).update(terminationGracePeriodSeconds=85),
        "worker and vLLM may take",
    ),
    "another port": (lambda o: change(o, "--port=8000", "--port=8001"), "the worker asks at http://127.0.0.1:8000"),
    "a port that is shown": (lambda o: vllm(o).update(ports=[{"containerPort": 8000}]), "others may ask vLLM"),
    "events that vLLM binds": (lambda o: change(o, "127.0.0.1:5557", "*:5557"), "KV events come over"),
    "another module": (lambda o: change(o, "kvfleet_vllm.connector", "kvfleet_vllm.conector"), "there is no module"),
    "another model": (lambda o: change(o, "$(KVFLEET_MODEL)", "org/other"), "not what the worker is"),
    "a probe from outside": (
        lambda o: vllm(o).update(livenessProbe={"httpGet": {"path": "/health", "port": 8000}}),
        "livenessProbe is not",
    ),
    "too little time to load": (lambda o: vllm(o)["startupProbe"].update(failureThreshold=10), "has less than 1800 s"),
    "no sockets": (
        lambda o: vllm(o)["volumeMounts"].remove({"name": "sockets", "mountPath": "/run/kvfleet"}),
        "the two share no volume for sockets",
    ),
    "a small /dev/shm": (
        lambda o: vllm(o)["volumeMounts"].remove({"name": "shm", "mountPath": "/dev/shm"}),
        "/dev/shm has the 64 MiB",
    ),
    "blocks of the vLLM container alone": (
        lambda o: spec(o)["containers"][0]["volumeMounts"].remove({"name": "shm", "mountPath": "/dev/shm"}),
        "the two share no volume for blocks",
    ),
    "a worker too small for its blocks": (
        lambda o: spec(o)["containers"][0]["resources"]["limits"].update(memory="4Gi"),
        "bytes of blocks do not fit 4Gi",
    ),
    "no GPU": (lambda o: vllm(o)["resources"]["limits"].pop("nvidia.com/gpu"), "GPUs of vLLM and its worker"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    breaks, told = FAULTS[fault]
    objects = deepcopy(list(render("vllm")))
    assert vllm_problems(objects) == []
    breaks(objects)
    found = vllm_problems(objects)
    assert any(told in problem for problem in found), found


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_is_needed(flag: str) -> None:
    objects = deepcopy(list(render("vllm")))
    assert flag in flags_of(vllm(objects))
    vllm(objects)["args"] = [one for one in vllm(objects)["args"] if one.partition("=")[0] != flag]
    assert vllm_problems(objects)


def test_two_equal_containers_are_refused() -> None:
    """Both would get SIGTERM at once."""
    objects = deepcopy(list(render("vllm")))
    as_an_equal(objects)
    (pod,) = [one for one in pods(objects) if one.component == "worker"]
    assert len(pod.spec["containers"]) == 2
    assert any("vLLM is no sidecar" in problem for problem in vllm_problems(objects))
