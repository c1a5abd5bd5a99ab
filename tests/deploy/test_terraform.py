"""deploy/terraform/gke, without Terraform's registry: syntax, names, the provider's schema, and what must be private.

`terraform validate` and `plan` have never run here: they need the provider and a project.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import hcl2
import pytest

from tests.deploy.terraform_files import Module, against_schema, at, bodies, read, undescribed, wrong_names
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/terraform/gke"
SCRIPTS = ("deploy_gke", "quickstart_gke", "gke_steps.sh")

# What the cluster and every node must have.
CLUSTER = {
    "private_cluster_config.enable_private_nodes": True,
    "master_authorized_networks_config.gcp_public_cidrs_access_enabled": False,
    "master_auth.client_certificate_config.issue_client_certificate": False,
    "networking_mode": "VPC_NATIVE",
    "datapath_provider": "ADVANCED_DATAPATH",
    "enable_shielded_nodes": True,
    "enable_legacy_abac": False,
    "remove_default_node_pool": True,
    "workload_identity_config.workload_pool": "${local.workload_pool}",
    "database_encryption.state": "ENCRYPTED",
    "binary_authorization.evaluation_mode": "PROJECT_SINGLETON_POLICY_ENFORCE",
    "release_channel.channel": "${var.release_channel}",
    "deletion_protection": "${var.deletion_protection}",
    "location": "${var.region}",
    "monitoring_config.managed_prometheus.enabled": True,
}
NODES = {
    "service_account": "${google_service_account.nodes.email}",
    "shielded_instance_config.enable_secure_boot": True,
    "shielded_instance_config.enable_integrity_monitoring": True,
    "workload_metadata_config.mode": "GKE_METADATA",
}
POOL = {
    "network_config.enable_private_nodes": True,
    "management.auto_repair": True,
    "management.auto_upgrade": True,
    "node_config.image_type": "COS_CONTAINERD",
    "node_config.kubelet_config.insecure_kubelet_readonly_port_enabled": "FALSE",
}
GPU = {
    "node_config.guest_accelerator.type": "${var.gpu_type}",
    "node_config.guest_accelerator.count": "${var.gpu_count}",
    "node_config.guest_accelerator.gpu_driver_installation_config.gpu_driver_version": "${var.gpu_driver_version}",
    "node_config.taint.key": "nvidia.com/gpu",
    "node_config.taint.effect": "NO_SCHEDULE",
    "node_config.spot": "${var.gpu_spot}",
    "autoscaling.total_min_node_count": "${var.gpu_nodes.min}",
    "autoscaling.total_max_node_count": "${var.gpu_nodes.max}",
}
BROAD = {"roles/owner", "roles/editor", "roles/viewer", "roles/container.admin", "roles/storage.admin"}


def insecure(module: Module) -> list[str]:
    wrong = []

    def want(where: str, body: dict, properties: dict) -> None:
        for path, value in properties.items():
            if at(body, path) != value:
                wrong.append(f"{where}: {path} is {at(body, path)!r}, not {value!r}")

    clusters = module.resources.get("google_container_cluster", {})
    pools = module.resources.get("google_container_node_pool", {})
    for name, body in clusters.items():
        want(f"cluster {name}", body, CLUSTER)
        want(f"cluster {name}, first pool", at(body, "node_config")[0], NODES)
    for name, body in pools.items():
        want(f"pool {name}", body, POOL)
        want(f"pool {name}", at(body, "node_config")[0], NODES)
    want("pool gpu", pools.get("gpu", {}), GPU)
    if not clusters or set(pools) != {"cpu", "gpu"}:
        wrong.append("there is not one cluster with the pools cpu and gpu")
    for name, body in module.resources.get("google_compute_network", {}).items():
        want(f"network {name}", body, {"auto_create_subnetworks": False})
    for name, body in module.resources.get("google_compute_subnetwork", {}).items():
        want(f"subnetwork {name}", body, {"private_ip_google_access": True})
    for name, body in module.resources.get("google_compute_firewall", {}).items():
        if at(body, "allow") is not None and "0.0.0.0/0" in str(body.get("source_ranges")):
            wrong.append(f"firewall {name} lets the internet in")
    for _, type_, name, body in bodies(module):
        if body.get("role") in BROAD:
            wrong.append(f"{type_}.{name} gives {body['role']}")
        if body.get("member") in ("allUsers", "allAuthenticatedUsers"):
            wrong.append(f"{type_}.{name} is for everybody")
        if type_ == "google_service_account_key":
            wrong.append(f"{name}: a service account key is a password that lies in the state")
    return wrong


def unpinned(module: Module) -> list[str]:
    wrong = []
    providers = {k: v for k, v in at(module.terraform, "required_providers")[0].items() if k != "__is_block__"}
    for name, provider in providers.items():
        if not re.fullmatch(r"\d+\.\d+\.\d+", str(provider.get("version"))):
            wrong.append(f"provider {name} is not pinned to a version: {provider.get('version')}")
    if "<" not in str(module.terraform.get("required_version")):
        wrong.append("terraform's own version has no upper bound")
    backend = (module.terraform.get("backend") or [{}])[0]
    if "gcs" not in backend:
        wrong.append("the state is not remote")
    elif set(backend["gcs"]) - {"__is_block__"}:
        wrong.append("the backend names a bucket: that differs between projects")
    return wrong


CHECKS = (wrong_names, undescribed, against_schema, insecure, unpinned)


@pytest.fixture(scope="module")
def module() -> Module:
    return read(FOLDER)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_nothing_is_wrong(module: Module, check) -> None:
    assert check(module) == []


MISTAKES = [
    # check, file, what stands there, what is put instead, what must be said
    (wrong_names, "network.tf", "var.region", "var.regoin", "var.regoin is not declared"),
    (wrong_names, "cluster.tf", "var.release_channel", '"REGULAR"', "variable release_channel is never used"),
    (wrong_names, "cluster.tf", "local.workload_pool", "local.pool", "local.pool is not declared"),
    (undescribed, "variables.tf", "  type        = bool\n", "", "has no type"),
    (undescribed, "outputs.tf", '  description = "Where the cluster is."\n', "", "output region has no description"),
    (against_schema, "cluster.tf", "enable_shielded_nodes ", "enable_shielded_node ", "knows no enable_shielded_node"),
    (against_schema, "node_pools.tf", "gpu_driver_version =", "driver_version =", "knows no driver_version"),
    (against_schema, "node_pools.tf", "gpu_driver_version =", "driver_version =", "lacks gpu_driver_version"),
    (against_schema, "cluster.tf", "release_channel {", "release_channel = {", "is a block, not an argument"),
    (against_schema, "cluster.tf", "enable_legacy_abac          = false", 'enable_legacy_abac = "no"', "true or false"),
    (against_schema, "outputs.tf", "fleet.name", "fleet.nam", "has no attribute nam"),
    (
        against_schema,
        "network.tf",
        "google_compute_router.fleet.name",
        "google_compute_router.fleet2.name",
        "not exist",
    ),
    (against_schema, "versions.tf", '"6.50.0"', '"6.49.0"', "pinned to 6.49.0"),
    (insecure, "cluster.tf", "enable_private_nodes    = true", "enable_private_nodes    = false", "private_nodes"),
    (
        insecure,
        "cluster.tf",
        "gcp_public_cidrs_access_enabled = false",
        "gcp_public_cidrs_access_enabled = true",
        "public_cidrs",
    ),
    (insecure, "cluster.tf", 'mode = "GKE_METADATA"', 'mode = "GCE_METADATA"', "workload_metadata_config"),
    (insecure, "cluster.tf", 'state    = "ENCRYPTED"', 'state    = "DECRYPTED"', "database_encryption"),
    (insecure, "node_pools.tf", "enable_private_nodes = true", "enable_private_nodes = false", "enable_private_nodes"),
    (
        insecure,
        "node_pools.tf",
        "enable_secure_boot          = true",
        "enable_secure_boot          = false",
        "secure_boot",
    ),
    (insecure, "node_pools.tf", "google_service_account.nodes.email", '"default"', "service_account"),
    (insecure, "node_pools.tf", '"NO_SCHEDULE"', '"PREFER_NO_SCHEDULE"', "taint"),
    (insecure, "identities.tf", "roles/container.defaultNodeServiceAccount", "roles/editor", "gives roles/editor"),
    (insecure, "identities.tf", "google_service_account.nodes.member", '"allUsers"', "for everybody"),
    (insecure, "network.tf", "deny {", "allow {", "lets the internet in"),
    (insecure, "network.tf", "auto_create_subnetworks = false", "auto_create_subnetworks = true", "auto_create"),
    (unpinned, "versions.tf", '"6.50.0"', '">= 6.0"', "not pinned"),
    (unpinned, "versions.tf", 'backend "gcs" {}', 'backend "local" {}', "not remote"),
]


@pytest.mark.parametrize(
    ("check", "file", "there", "instead", "said"), MISTAKES, ids=[f"{m[0].__name__}-{m[4]}" for m in MISTAKES]
)
def test_a_planted_mistake_is_seen(tmp_path: Path, check, file: str, there: str, instead: str, said: str) -> None:
    for path in FOLDER.glob("*.tf"):
        text = path.read_text()
        if path.name == file:
            assert there in text, "the mistake's place is gone"
            text = text.replace(there, instead)
        (tmp_path / path.name).write_text(text)
    wrong = check(read(tmp_path))
    assert any(said in sentence for sentence in wrong), wrong


def test_outputs_that_scripts_read_exist(module: Module) -> None:
    used = set()
    for script in SCRIPTS:
        used |= set(re.findall(r"\bterraform_output (\w+)", (ROOT / "scripts" / script).read_text()))
    assert {"registry", "cluster_name", "ingress_address"} <= used, "the scripts read outputs in another way now"
    assert used <= set(module.outputs)


def test_variables_that_scripts_set_exist(module: Module) -> None:
    text = (ROOT / "scripts/quickstart_gke").read_text()
    used = set(re.findall(r'-var[ =]"?(\w+)=', text))
    assert {name for name, body in module.variables.items() if "default" not in body} <= used
    assert {"region", "name", "deletion_protection"} <= used
    assert used <= set(module.variables)


def test_the_example_sets_what_must_be_set(module: Module) -> None:
    example = hcl2.loads((FOLDER / "terraform.tfvars.example").read_text())
    example.pop("__comments__", None)
    assert set(example) <= set(module.variables)
    assert {name for name, body in module.variables.items() if "default" not in body} <= set(example)
    assert hcl2.loads((FOLDER / "backend.hcl.example").read_text()).keys() >= {"bucket", "prefix"}


def test_every_skipped_scan_has_a_reason() -> None:
    skips = re.findall(r"checkov:skip(.*)", "\n".join(p.read_text() for p in FOLDER.glob("*.tf")))
    assert skips
    for skip in skips:
        assert re.fullmatch(r"=CKV2?_GCP_\d+:.{20,}", skip), skip


def test_readme_names_every_variable_and_what_was_never_run(module: Module) -> None:
    readme = (FOLDER / "README.md").read_text()
    assert [name for name in module.variables if f"`{name}`" not in readme] == []
    assert [name for name in module.outputs if f"`{name}`" not in readme] == []
    assert "never been planned or applied" in " ".join(readme.split())


TERRAFORM = pytest.mark.skipif(
    shutil.which("terraform") is None, reason="terraform is not installed (it is in no Debian package)"
)
BAD = {
    "project_id": "My Project",
    "name": "a-name-that-is-much-too-long",
    "region": "us-central1-a",
    "authorized_networks": '{ all = "0.0.0.0/0" }',
    "release_channel": "weekly",
    "key_ring_name": "a b",
    "control_plane_cidr": "172.16.0.0/24",
    "pod_cidr": "10.20.0.0",
    "cpu_nodes": "{ min = 4, max = 3 }",
    "gpu_nodes": "{ min = 0, max = 0 }",
    "gpu_type": "a100",
    "gpu_count": "3",
    "gpu_driver_version": "newest",
    "gpu_disk_size_gb": "20",
    "keda_service_account": "keda-operator",
}


@TERRAFORM
def test_terraform_itself_judges_the_variables(module: Module, tmp_path: Path) -> None:
    """Without resources there is no provider to fetch, and `plan` still checks every validation."""
    shutil.copy(FOLDER / "variables.tf", tmp_path)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CHECKPOINT_DISABLE": "1"}

    def plan(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            ["terraform", "plan", "-input=false", "-no-color", "-lock=false", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, said = plan(f"-var-file={FOLDER / 'terraform.tfvars.example'}")
    assert code == 0, said
    code, said = plan(*(f"-var={name}={value}" for name, value in BAD.items()))
    assert code == 1
    said = " ".join(re.sub("[│╷╵]", " ", said).split())
    for name in BAD:
        for validation in module.variables[name]["validation"]:
            if validation["error_message"].startswith("authorized_networks needs"):
                continue  # that of the empty map
            assert " ".join(validation["error_message"].split()) in said, name
    assert said.count("Invalid value for variable") == len(BAD)


@TERRAFORM
def test_format() -> None:
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-diff", "-recursive", str(FOLDER)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
