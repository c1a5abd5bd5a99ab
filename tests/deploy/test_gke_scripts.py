"""scripts/deploy_gke, with recorders in place of every tool that would reach a cluster.

Nothing here shows that a cluster accepts these commands: that was never tried.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.gke_stage import FLEET, ROOT, Ran, Stage, make_stage, printed, tree


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return make_stage(tmp_path)


def test_a_deployment_goes_step_by_step(stage: Stage) -> None:
    before = tree(stage.root)
    ran = stage.deploy()
    assert ran.code == 0, ran.err
    order = [
        ran.where("create", "namespace", "kvfleet"),
        ran.where("create", "secret", "kvfleet-nats-tls"),
        ran.where("create", "secret", "kvfleet-ingress-tls"),
        ran.where("kubectl", "kustomize"),
        ran.where("delete", "job", "init"),
        next(i for i, line in enumerate(ran.lines) if re.search(r" apply -f \S+/fleet.yaml$", line)),
        ran.where("status", "statefulset/nats"),
        ran.where("wait", "job/init"),
        ran.where("status", "deployment/placement"),
        ran.where("status", "statefulset/vault"),
        ran.where("status", "statefulset/worker"),
        ran.where("status", "deployment/ingress"),
        next(
            i
            for i, line in enumerate(ran.lines)
            if line.endswith("/v1/models --retry 30 --retry-delay 10 --retry-all-errors")
        ),
        len(ran.lines) - 1,
    ]
    assert order == sorted(order)
    assert "https://203.0.113.10/generate" in ran.calls[-1]
    assert "serves: https://203.0.113.10" in ran.err
    for call in ran.calls:
        if call[0] == "kubectl" and call[1] != "kustomize":
            assert call[1:3] == ["--context", "ctx"], "a command for whatever cluster is the current one"
    assert tree(stage.root) == before
    assert list((stage.base / "tmp").iterdir()) == [], "what was rendered is left lying about"


def test_what_is_applied_is_what_was_made(stage: Stage) -> None:
    ran = stage.deploy()
    assert ran.code == 0, ran.err
    applied = ran.applied.replace("---\n", "").splitlines()
    assert len(applied) == 8
    assert all(line.startswith("made by: kubectl --context ctx ") for line in applied)


def test_a_setting_is_found_however_many_follow_it(stage: Stage) -> None:
    ran = stage.deploy(*["--set", f"accelerator={'l4' * 2000}"] * 30)  # more than a pipe takes at once
    assert ran.code == 0, ran.err


def test_secrets_go_as_file_names_alone(stage: Stage) -> None:
    for ran in (stage.deploy(), stage.deploy("--dry-run"), stage.quickstart("--yes"), stage.quickstart("--dry-run")):
        assert ran.code == 0, ran.err
        for text in (*ran.lines, ran.out, ran.err, ran.applied):
            assert "CONTENT-OF" not in text
            assert "TOKEN-OF" not in text
            assert "PRIVATE KEY" not in text
        kubectl = " ".join(line for line in [*ran.lines, *ran.out.splitlines()] if line.startswith("kubectl"))
        for kept in ("ca.key", "api-key.txt", "producer-public.seed"):
            assert kept not in kubectl, f"{kept} has no business on a cluster"


def test_the_key_reaches_curl_on_its_standard_input(stage: Stage) -> None:
    ran = stage.deploy()
    assert ran.stdin.splitlines() == ['header = "Authorization: Bearer CONTENT-OF-api-key.txt"'] * 2
    assert all("--config" in call for call in ran.calls if call[0] == "curl")


@pytest.mark.parametrize(
    "refused",
    [
        "create namespace",
        "create secret generic kvfleet-nkeys",
        "kustomize",
        "fleet.yaml",
        "job/init",
        "/v1/models",
        "/generate",
    ],
)
def test_nothing_follows_a_failure(stage: Stage, refused: str) -> None:
    ran = stage.deploy(FAIL_ON=refused)
    assert ran.code != 0
    assert refused in ran.lines[-1], "it went on"
    assert "says no" in ran.err
    if refused == "job/init":
        assert "job/init is not there after 45m. Why: kubectl --context ctx --namespace kvfleet get" in ran.err
    assert "serves" not in ran.err


def test_a_dry_run_prints_what_a_run_does_and_runs_nothing(stage: Stage) -> None:
    ran, dry = stage.deploy(), stage.deploy("--dry-run")
    assert dry.code == 0, dry.err
    assert dry.calls == []

    def plain(calls: list[list[str]]) -> list[list[str]]:
        """Without questions to the cluster, and with one name for the folder of what is rendered."""
        work = re.compile(r"\S*/(kvfleet-deploy|tmp\.\w+)")
        kubectl = [call for call in calls if call[0] == "kubectl" and "get" not in call]
        return [[work.sub("WORK", word) for word in call] for call in kubectl]

    assert plain(printed(dry.out)) == plain(ran.calls)
    said = [
        call[-1] if call[-1].startswith("https") else call[call.index("--header") - 1] for call in printed(dry.out)[-2:]
    ]
    assert said == ["https://ADDRESS/v1/models", "https://ADDRESS/generate"]
    assert f"--from-file=tls.key={stage.secrets}/nats.key" in [word for call in printed(dry.out) for word in call]


def test_a_second_deployment_does_the_same(stage: Stage) -> None:
    def same(ran: Ran) -> list[str]:
        return [re.sub(r"\S*/tmp\.\w+", "WORK", line) for line in ran.lines]

    first, second = stage.deploy(), stage.deploy()
    assert second.code == 0
    assert same(first) == same(second)
    for line in first.lines:
        if " create " in line:
            assert line.endswith("--dry-run=client -o yaml"), f"it fails when the object is there: {line}"


def test_another_namespace_and_no_request(stage: Stage) -> None:
    (stage.secrets / "api-key.txt").unlink()
    ran = stage.deploy("--namespace", "other", "--no-smoke")
    assert ran.code == 0, ran.err
    assert not ran.has("curl")
    assert ran.has("create", "namespace", "other")
    for call in ran.calls:
        if {"secret", "rollout", "wait", "job"} & set(call):
            assert call[3:5] == ["--namespace", "other"]


def test_a_hubs_token_becomes_a_secret_and_is_never_said(stage: Stage) -> None:
    token = stage.base / "hub token.txt"
    token.write_text("CONTENT-OF-hub-token\n")
    for ran in (
        stage.deploy("--hub-token-file", str(token)),
        stage.quickstart("--yes", "--hub-token-file", str(token)),
    ):
        assert ran.code == 0, ran.err
        call = ran.calls[ran.where("create", "secret", "kvfleet-hub-token")]
        assert f"--from-file=token={token}" in call
        assert not any("CONTENT-OF" in text for text in (*ran.lines, ran.out, ran.err))
    assert not stage.deploy().has("create", "secret", "kvfleet-hub-token")
    token.write_text("")
    for ran in (stage.deploy("--hub-token-file", str(token)), stage.quickstart("--hub-token-file", str(token))):
        assert ran.code == 1
        assert "is not there, or empty" in ran.err
        assert ran.calls == []


def test_each_wait_is_longer_than_a_model_may_take_to_load() -> None:
    (minutes,) = re.findall(r"\btimeout=(\d+)m\b", (ROOT / "scripts/deploy_gke").read_text())
    probe = re.search(
        r"startupProbe:.*?periodSeconds: (\d+).*?failureThreshold: (\d+)",
        (ROOT / "deploy/k8s/base/worker/worker.yaml").read_text(),
        re.DOTALL,
    )
    assert probe is not None
    assert 60 * int(minutes) > int(probe[1]) * int(probe[2]) + 600, "a node and its image come before"


def test_the_request_at_the_end_must_end(stage: Stage) -> None:
    ran = stage.deploy(LAST_EVENT="token")
    assert ran.code != 0
    assert "without an end" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--overlay", "nowhere"], "no such overlay"),
        (["--set", "colour=blue"], "overlay gke-gpu has no such setting"),
        (["--set", 'accelerator="; rm -rf /'], "without quotes"),
        (["--set", "accelerator"], "wants NAME=VALUE"),
        (["--context", "--dry-run"], "--context wants a value"),
        (["--context"], "--context wants a value"),
        (["--frobnicate"], "unknown flag: --frobnicate"),
    ],
)
def test_wrong_flags_are_named_and_nothing_runs(stage: Stage, arguments: list[str], said: str) -> None:
    ran = stage.deploy(*arguments)
    assert ran.code == 1
    assert said in ran.err
    assert ran.calls == []


def test_what_must_be_given_is_asked_for(stage: Stage) -> None:
    assert "--context is needed" in stage.run("deploy_gke").err
    bare = ["--context", "c", "--images", "i", "--tag", "t", "--secrets", str(stage.secrets)]
    ran = stage.run("deploy_gke", *bare)
    assert ran.code == 1
    assert "needs --set project=" in ran.err
    assert "--project is needed" in stage.run("quickstart_gke").err
    assert "--authorized-network is needed" in stage.run("quickstart_gke", "--project", "p").err


def test_missing_secrets_are_named_all_at_once(stage: Stage) -> None:
    for name in ("nats.key", "nkeys/vault.seed", "ingress.crt"):
        (stage.secrets / name).unlink()
    ran = stage.deploy()
    assert ran.code == 1
    assert ran.calls == []
    for name in ("nats.key", "nkeys/vault.seed", "ingress.crt", "kvfleet secrets --out"):
        assert name in ran.err


def test_missing_tools_are_named_all_at_once(stage: Stage) -> None:
    bare = stage.base / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname", "basename", "realpath", "grep", "cat", "sed"):
        (bare / tool).symlink_to(shutil.which(tool) or "")
    ran = stage.deploy(PATH=str(bare))
    assert ran.code == 1
    assert "not on PATH: kubectl curl" in ran.err
    ran = stage.quickstart(PATH=str(bare))
    assert "not on PATH: gcloud kubectl terraform docker curl openssl git gke-gcloud-auth-plugin" in ran.err


def test_a_kind_that_the_cluster_lacks_stops_before_anything_is_applied(stage: Stage) -> None:
    (stage.base / "fleet.yaml").write_text(FLEET + "\n---\napiVersion: keda.sh/v1alpha1\nkind: ScaledObject\n")
    ran = stage.deploy(FAIL_ON="get crd scaledobjects.keda.sh")
    assert ran.code == 1
    assert "needs KEDA" in ran.err
    assert not any("apply -f" in line and "fleet.yaml" in line for line in ran.lines)
    assert stage.deploy().code == 0


def test_an_image_from_elsewhere_is_refused(stage: Stage) -> None:
    (stage.base / "fleet.yaml").write_text(FLEET.replace("eu/x/kvfleet-nats", "REGION/kvfleet-nats") + "\n")
    ran = stage.deploy()
    assert ran.code == 1
    assert "images from elsewhere: REGION/kvfleet-nats:t1" in ran.err


def test_an_overlay_without_vaults_is_not_waited_for(stage: Stage) -> None:
    (stage.base / "fleet.yaml").write_text(FLEET.replace("name: vault", "name: other") + "\n")
    ran = stage.deploy()
    assert ran.code == 0
    assert not ran.has("statefulset/vault")
    assert ran.has("statefulset/worker")


@pytest.mark.parametrize("script", ["deploy_gke", "quickstart_gke", "deploy_tools", "vllm_install"])
def test_help_names_every_flag(script: str) -> None:
    text = (ROOT / "scripts" / script).read_text()
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / script), "--help"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    cases = re.findall(r"^ {4}((?:--[\w-]+(?: \| (?:\\\n\s+)?)?)+)\)", text, re.MULTILINE)
    flags = {flag for case in cases for flag in re.findall(r"--[\w-]+", case)} - {"--help"}
    assert flags
    assert [flag for flag in flags if flag not in done.stdout] == []
