"""The pods of the overlay gke-gpu fit the nodes that deploy/terraform/gke makes: each one, and all together."""

from __future__ import annotations

import re
from typing import Any

import hcl2
import pytest

from tests.deploy.gke_capacity import DISK, Pool, allocatable_disk, capacity_problems, pool, requests
from tests.deploy.k8s_objects import pods
from tests.deploy.k8s_render import ROOT, render
from tests.deploy.terraform_files import at, read

FOLDER = ROOT / "deploy/terraform/gke"


def pools(**other: Any) -> tuple[Pool, Pool]:
    """With Terraform's defaults but for `other`."""
    module = read(FOLDER)
    variables = {name: body.get("default") for name, body in module.variables.items()} | other
    disk = at(module.resources["google_container_node_pool"]["cpu"], "node_config.disk_size_gb")
    return (
        pool("cpu", variables["cpu_machine_type"], disk, variables["cpu_nodes"]),
        pool(
            "gpu",
            variables["gpu_machine_type"],
            variables["gpu_disk_size_gb"],
            variables["gpu_nodes"],
            variables["gpu_count"],
        ),
    )


def example() -> dict[str, Any]:
    text = hcl2.loads((FOLDER / "terraform.tfvars.example").read_text())
    return {
        name: value[1:-1] if isinstance(value, str) else value
        for name, value in text.items()
        if name in ("gpu_machine_type", "gpu_nodes", "gpu_disk_size_gb")
    }


def test_the_fleet_fits_the_pools() -> None:
    assert capacity_problems(render("gke-gpu"), *pools()) == []


def test_it_fits_those_of_the_example() -> None:
    assert example().keys() >= {"gpu_machine_type", "gpu_nodes"}
    assert capacity_problems(render("gke-gpu"), *pools(**example())) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"gpu_disk_size_gb": 200}, "StatefulSet/worker asks for more ephemeral-storage"),
        ({"gpu_machine_type": "n2-standard-8"}, "StatefulSet/worker asks for more memory"),
        ({"gpu_nodes": {"min": 0, "max": 8}}, "gpu: 16 nodes are needed, there are 8"),
        ({"gpu_count": 0}, "StatefulSet/worker asks for more nvidia.com/gpu"),
        ({"cpu_nodes": {"min": 2, "max": 9}}, "cpu: 3 nodes are needed, there are 2"),
    ],
)
def test_pools_that_are_too_small_are_seen(other: dict[str, Any], said: str) -> None:
    assert any(said in one for one in capacity_problems(render("gke-gpu"), *pools(**other)))


def test_what_is_kept_of_a_disk() -> None:
    """As Google's page has it for 100 GB, of which a node reports 94.3 GiB: 43.9 GiB are left."""
    assert allocatable_disk(100) == pytest.approx(43.9, abs=0.5)
    assert allocatable_disk(500) == pytest.approx(0.94 * 450 - 100), "100 GiB at most, and a tenth"


def test_the_smallest_disk_that_terraform_admits_is_enough() -> None:
    text = (FOLDER / "variables.tf").read_text()
    (least,) = re.findall(r"var\.gpu_disk_size_gb >= (\d+)", text)
    (asked,) = {requests(pod)[DISK] for pod in pods(render("gke-gpu")) if DISK in requests(pod)}
    assert allocatable_disk(int(least)) > asked
