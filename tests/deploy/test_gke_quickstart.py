"""scripts/quickstart_gke, with recorders in place of every tool that would reach Google Cloud.

Nothing here shows that Google Cloud accepts these commands: that was never tried.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy.gke_stage import Stage, make_stage, printed, tree
from tests.support.waiting import LIMIT_S


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return make_stage(tmp_path)


def test_a_quickstart_goes_step_by_step(stage: Stage) -> None:
    before = tree(stage.root)
    ran = stage.quickstart("--yes")
    assert ran.code == 0, ran.err
    order = [
        ran.where("gcloud", "projects", "describe"),
        ran.where("gcloud", "services", "enable"),
        ran.where("buckets", "create", "gs://my-project-kvfleet-state"),
        ran.where("buckets", "update", "--versioning"),
        ran.where("terraform", "init"),
        ran.where("terraform", "apply"),
        ran.where("get-credentials"),
        ran.where("status", "deployment/keda-operator"),
        ran.where("gcloud", "configure-docker"),
        ran.where("build_images"),
        ran.where("kvfleet", "secrets"),
        ran.where("create", "namespace"),
        ran.where("status", "deployment/ingress"),
        len(ran.calls) - 1,
    ]
    assert order == sorted(order)
    assert ran.calls[ran.where("build_images")][1:] == [
        *("--push", "eu/x", "--tag", "t1"),
        *("--target", "control", "--target", "nats", "--target", "worker-gpu"),
    ]
    apply = ran.calls[ran.where("terraform", "apply")]
    assert {"-auto-approve", "-var=project_id=my-project", "-var=region=us-central1"} <= set(apply)
    assert '-var=authorized_networks={ quickstart = "203.0.113.7/32" }' in apply
    assert tree(stage.root) == before
    assert list((stage.base / "home").iterdir()) == [], "the user's own kubeconfig was touched"


@pytest.mark.parametrize(
    "refused", ["print-access-token", "versioning", "apply -auto", "get-credentials", "--push", "secrets --out"]
)
def test_a_quickstart_stops_at_a_failure(stage: Stage, refused: str) -> None:
    ran = stage.quickstart("--yes", FAIL_ON=refused)
    assert ran.code != 0
    assert refused in ran.lines[-1], "it went on"


def test_without_yes_terraform_asks_itself(stage: Stage) -> None:
    ran = stage.quickstart(FAIL_ON="get-credentials")
    assert "-auto-approve" not in ran.calls[ran.where("terraform", "apply")]


def test_a_second_quickstart_makes_only_what_is_missing(stage: Stage) -> None:
    assert stage.quickstart("--yes").code == 0
    before = tree(stage.base / "work/secrets")
    again = stage.quickstart("--yes", EXISTS="1")
    assert again.code == 0, again.err
    assert not again.has("buckets", "create")
    assert not again.has("build_images")
    assert tree(stage.base / "work/secrets") == before


def test_the_https_certificate_is_for_the_address(stage: Stage) -> None:
    assert stage.quickstart("--yes").code == 0
    secrets = stage.base / "work/secrets"
    names = subprocess.run(
        ["openssl", "x509", "-in", str(secrets / "ingress.crt"), "-noout", "-ext", "subjectAltName"],
        capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert "IP Address:203.0.113.10" in names.stdout
    check = [
        "openssl",
        "verify",
        "-CAfile",
        str(secrets / "ca.crt"),
        "-purpose",
        "sslserver",
        str(secrets / "ingress.crt"),
    ]
    assert subprocess.run(check, capture_output=True, timeout=LIMIT_S).returncode == 0
    assert (secrets / "ingress.key").stat().st_mode & 0o077 == 0
    own = secrets / "ingress-ca.crt"  # a public authority's: left alone, and what curl trusts
    own.write_text("a public authority\n")
    (secrets / "ingress.crt").write_text("for another name\n")
    ran = stage.quickstart("--yes")
    assert (secrets / "ingress.crt").read_text() == "for another name\n"
    assert str(own) in ran.calls[-1]


def test_an_https_certificate_that_ends_soon_is_made_anew(stage: Stage) -> None:
    assert stage.quickstart("--yes").code == 0
    certificate = stage.base / "work/secrets/ingress.crt"
    good = certificate.read_bytes()
    for days in (20, 40):
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
        make += ["-days", str(days), "-subj", "/CN=x", "-addext", "subjectAltName=IP:203.0.113.10"]
        make += ["-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate)]
        subprocess.run(make, check=True, capture_output=True, timeout=LIMIT_S)
        before = certificate.read_bytes()
        assert stage.quickstart("--yes").code == 0
        assert (certificate.read_bytes() == before) == (days > 30)
        assert certificate.read_bytes() != good


def test_a_dry_quickstart_runs_nothing(stage: Stage) -> None:
    dry = stage.quickstart("--dry-run")
    assert dry.code == 0, dry.err
    assert dry.calls == []
    assert not (stage.base / "work").exists()
    ran = stage.quickstart("--yes")
    shown = {tuple(call[:3]) for call in printed(dry.out)}
    for call in ran.calls:
        if not {"describe", "output", "get", "kustomize"} & set(call) and call[0] not in (
            "build_images",
            "kvfleet",
            "curl",
        ):
            assert tuple(call[:3]) in shown, f"{call} was not announced"


def test_a_private_control_plane_is_asked_from_inside(stage: Stage) -> None:
    ran = stage.quickstart("--yes", PRIVATE_ENDPOINT="true", FAIL_ON="keda-operator")
    assert "--internal-ip" in ran.calls[ran.where("get-credentials")]


def test_destroying_wants_the_name_typed(stage: Stage) -> None:
    stage.typed = "yes\n"
    ran = stage.quickstart("--destroy")
    assert ran.code == 1
    assert ran.calls == []
    stage.typed = "kvfleet\n"
    assert stage.quickstart("--destroy").code == 0


def test_destroying_takes_what_terraform_does_not_know_first(stage: Stage) -> None:
    ran = stage.quickstart("--destroy", "--yes")
    assert ran.code == 0, ran.err
    order = [
        ran.where("terraform", "init"),
        ran.where("delete", "namespace", "kvfleet"),
        ran.where("terraform", "apply", "-var=deletion_protection=false", "-target=google_container_cluster.fleet"),
        ran.where("terraform", "destroy"),
    ]
    assert order == sorted(order)
    half_made = stage.quickstart("--destroy", "--yes", FAIL_ON="output -raw cluster_name")
    assert half_made.code == 0, half_made.err
    assert not half_made.has("kubectl")
    stuck = stage.quickstart("--destroy", "--yes", FAIL_ON="delete namespace")
    assert stuck.code != 0
    assert not stuck.has("destroy"), "its load balancer would be left behind"
