"""What each overlay is for is in what it renders to: kustomize drops a patch that matches nothing without a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.k8s_objects import environment, named, of_kind, pods, strings
from tests.deploy.k8s_processes import mounted_files
from tests.deploy.k8s_references import SECRETS
from tests.deploy.k8s_render import K8S, OVERLAYS, ROOT, copied, render, render_combination, render_or_fail

GPU = "nvidia.com/gpu"


def images(overlay: str) -> set[str]:
    return {container["image"] for pod in pods(render(overlay)) for container in pod.containers}


def test_a_gpu_for_each_worker_and_for_nobody_else() -> None:
    for pod in pods(render("gke-gpu")):
        has = [container["resources"].get("limits", {}).get(GPU) for container in pod.containers]
        assert has == (["1"] if pod.component == "worker" else [None])
        tolerates = [one["key"] for one in pod.spec.get("tolerations", [])]
        assert tolerates == ([GPU] if pod.component == "worker" else [])
    worker = named(render("gke-gpu"), "StatefulSet", "worker")["spec"]["template"]["spec"]
    assert worker["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert not [path for one in render("local") for path, text in strings(one) if "gpu" in text or "gpu" in path]


def test_images_are_the_overlays() -> None:
    assert images("local") == {"kvfleet-control:dev", "kvfleet-worker:dev", "kvfleet-nats:dev"}
    registry = "REGION-docker.pkg.dev/PROJECT/kvfleet/"
    assert images("gke-gpu") == {
        f"{registry}{name}:0.1.0" for name in ("kvfleet-control", "kvfleet-worker-gpu", "kvfleet-nats")
    }


def test_a_gpu_for_each_vllm_and_its_worker_beside_it() -> None:
    (worker,) = [pod for pod in pods(render("vllm")) if pod.component == "worker"]
    assert [(one["name"], one["resources"]["limits"].get(GPU)) for one in worker.containers] == [
        ("vllm", "1"),
        ("worker", None),
    ]
    assert [one["key"] for one in worker.spec["tolerations"]] == [GPU]
    told = environment(worker.main, render("vllm"))
    assert (told["KVFLEET_ENGINE"], told["KVFLEET_MODEL"]) == ("vllm", "Qwen/Qwen2.5-7B-Instruct")


def test_vllm_has_the_token_of_the_hub_and_no_key_of_the_fleet() -> None:
    (worker,) = [pod for pod in pods(render("vllm")) if pod.component == "worker"]
    vllm, _ = worker.containers
    assert mounted_files(vllm, worker.spec["volumes"]) == {"/etc/kvfleet/hub/token"}


def test_how_many_of_each() -> None:
    for overlay, workers, vaults in (("base", 4, None), ("local", 2, 1), ("gke-gpu", None, 2), ("vllm", 2, None)):
        objects = render(overlay)
        counts = {pod.component: pod.owner["spec"].get("replicas") for pod in pods(objects) if pod.component != "init"}
        wanted = {"nats": 3, "ingress": None, "placement": 2, "worker": workers, "vault": vaults}
        assert counts == {role: wanted[role] for role in counts}
        assert ("vault" in counts) == (vaults is not None)
        scaler = named(objects, "HorizontalPodAutoscaler", "ingress")["spec"]
        assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 10)
        (metric,) = scaler["metrics"]
        assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}


def test_workers_are_as_many_as_placement_wants() -> None:
    scaled = named(render("gke-gpu"), "ScaledObject", "worker")["spec"]
    (trigger,) = scaled["triggers"]
    told = environment(named(render("gke-gpu"), "StatefulSet", "worker")["spec"]["template"]["spec"]["containers"][0],
                       render("gke-gpu"))  # fmt: skip
    model = told["KVFLEET_SERVED_MODEL_NAME"]
    assert trigger["metadata"]["query"] == f'max(kvfleet_model_desired_replicas{{model="{model}"}})'
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (4, 16)
    said = environment(named(render("gke-gpu"), "Deployment", "placement")["spec"]["template"]["spec"]["containers"][0],
                       render("gke-gpu"))  # fmt: skip
    assert (said["KVFLEET_MIN_REPLICAS"], said["KVFLEET_MAX_REPLICAS"]) == ("4", "16")
    assert (said["KVFLEET_MODELS"], said["KVFLEET_SCALE_DOWN"]) == (model, "ordinal")
    assert scaled["fallback"]["replicas"] >= scaled["minReplicaCount"]
    down = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 600
    assert [policy["value"] for policy in down["policies"] if policy["type"] == "Pods"] == [1]
    assert trigger["metadata"]["serverAddress"].startswith("https://monitoring.googleapis.com/v1/projects/PROJECT/")


def test_what_is_told_of_scaling_down_is_what_the_manifests_do() -> None:
    told = " ".join((ROOT / "docs/autoscaling.md").read_text().split())
    down = named(render("gke-gpu"), "ScaledObject", "worker")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    window = down["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
    assert re.findall(r"window \(?(\d+) s", told) == [str(window)] * 2
    worker = named(render("gke-gpu"), "StatefulSet", "worker")["spec"]["template"]["spec"]
    hook = " ".join(worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"])
    assert f"preStop `{hook}`" in told
    assert f"grace period ({worker['terminationGracePeriodSeconds']} s)" in told


def test_the_model_of_a_base_with_keda_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    objects = render_combination(("keda",), tmp_path)
    told = environment(named(objects, "StatefulSet", "worker")["spec"]["template"]["spec"]["containers"][0], objects)
    query = named(objects, "ScaledObject", "worker")["spec"]["triggers"][0]["metadata"]["query"]
    assert f'model="{told["KVFLEET_MODEL"]}"' in query


def test_every_service_traces_to_where_it_may_connect(tmp_path: Path) -> None:
    objects = render_combination(("vault", "tracing"), tmp_path)
    for pod in pods(objects):
        if pod.component in ("ingress", "placement", "worker", "vault"):
            told = environment(pod.containers[0], objects)
            assert told["KVFLEET_OTLP_ENDPOINT"] == "http://opentelemetry-collector.observability.svc:4318"
            assert float(told["KVFLEET_TRACE_SAMPLE_RATIO"] or 0) == 0.1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_role_holds_its_own_keys_and_no_others(overlay: str) -> None:
    seeds: dict[str, set[str]] = {}
    for pod in pods(render(overlay)):
        for volume in pod.spec["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                if source.get("secret", {}).get("name") == "kvfleet-nkeys":
                    seeds.setdefault(pod.component, set()).update(item["key"] for item in source["secret"]["items"])
    own = {
        "ingress": {"ingress.seed"},
        "placement": {"placement.seed", "sys.seed"},
        "worker": {"worker.seed"},
        "vault": {"vault.seed"},
        "init": {"admin.seed"},
    }
    assert seeds == {role: own[role] for role in seeds}
    assert own.keys() - seeds.keys() == set() if overlay != "vllm" else {"vault"}
    fleet_key = {
        pod.component
        for pod in pods(render(overlay))
        for container in pod.containers
        if any(path.endswith("/fleet.key") for path in mounted_files(container, pod.spec["volumes"]))
    }
    assert fleet_key == {"ingress", "placement", "worker"}, "those that derive tenants' salts"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_tls_everywhere(overlay: str) -> None:
    objects = render(overlay)
    for pod in pods(objects):
        if pod.component == "nats":
            continue
        told = environment(pod.main, objects)
        servers = (told["KVFLEET_NATS_URL"] or "").split(",")
        assert len(servers) == 3
        assert all(server.startswith("tls://") for server in servers)
        assert {"KVFLEET_NATS_CA", "KVFLEET_NATS_CERT", "KVFLEET_NATS_KEY", "KVFLEET_NATS_NKEY_SEED_FILE"} <= set(told)
        if pod.component in ("worker", "vault"):
            assert {f"KVFLEET_DATA_PLANE_{name}" for name in ("CERT", "KEY", "CA")} <= set(told)
        if pod.component == "ingress":
            assert {"KVFLEET_TLS_CERT", "KVFLEET_TLS_KEY", "KVFLEET_API_KEYS_FILE"} <= set(told)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_secret_is_written_down(overlay: str) -> None:
    assert of_kind(render(overlay), "Secret") == []
    secret = re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY|\bS[UOANC][A-Z2-7]{56}\b|\bhf_[A-Za-z0-9]{20,}|\bkvf_[A-Za-z0-9]{20,}"
    )
    texts = [path.read_text() for path in K8S.rglob("*") if path.is_file()]
    texts += [text for one in render(overlay) for _, text in strings(one)]
    assert not [found for text in texts if (found := secret.search(text))]


def test_the_ingress_shows_the_world_one_port() -> None:
    for overlay in OVERLAYS:
        service = named(render(overlay), "Service", "ingress")["spec"]
        assert service["type"] == "LoadBalancer"
        assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [(443, "https")]
        outside = [
            one for one in of_kind(render(overlay), "Service") if one["spec"].get("type") not in (None, "ClusterIP")
        ]
        assert [one["metadata"]["name"] for one in outside] == ["ingress"]
    assert named(render("gke-gpu"), "Service", "ingress")["spec"]["loadBalancerIP"] == "192.0.2.1"


def test_a_vaults_memory_and_disk_have_room_for_what_it_is_told_to_keep() -> None:
    units = {"Mi": 2**20, "Gi": 2**30}
    for overlay in ("local", "gke-gpu"):
        vault = named(render(overlay), "StatefulSet", "vault")["spec"]
        (container,) = vault["template"]["spec"]["containers"]
        told = environment(container, render(overlay))
        for said, kept in (
            (container["resources"]["limits"]["memory"], told["KVFLEET_MAX_BYTES"]),
            (
                vault["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"],
                told["KVFLEET_DISK_MAX_BYTES"],
            ),
        ):
            assert int(kept or 0) < 0.95 * int(said[:-2]) * units[said[-2:]]


def test_settings_of_a_fleet_on_gke_stand_in_one_place(tmp_path: Path) -> None:
    """Every line of settings.yaml reaches what it is for."""
    k8s = copied(tmp_path)
    settings = k8s / "overlays" / "gke-gpu" / "settings.yaml"
    text = settings.read_text()
    for old, new in (
        ("project: PROJECT", "project: my-project"),
        ("192.0.2.1", "203.0.113.77"),
        ("nvidia-l4", "nvidia-h100-80gb"),
        ("Qwen/Qwen2.5-7B-Instruct", "org/other"),
        ("qwen2.5-7b-instruct", "other"),
    ):
        assert old in text
        text = text.replace(old, new)
    settings.write_text(text)
    objects = render_or_fail(k8s / "overlays" / "gke-gpu")
    worker = named(objects, "StatefulSet", "worker")["spec"]["template"]["spec"]
    told = environment(worker["containers"][0], objects)
    assert (told["KVFLEET_MODEL"], told["KVFLEET_SERVED_MODEL_NAME"]) == ("org/other", "other")
    assert worker["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert named(objects, "Service", "ingress")["spec"]["loadBalancerIP"] == "203.0.113.77"
    trigger = named(objects, "ScaledObject", "worker")["spec"]["triggers"][0]["metadata"]
    assert trigger["query"] == 'max(kvfleet_model_desired_replicas{model="other"})'
    assert "/projects/my-project/location/" in trigger["serverAddress"]
    before = {one["metadata"]["name"] for one in of_kind(render("gke-gpu"), "ConfigMap")}
    after = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")}
    changed = sorted(name.rpartition("-")[0] for name in after - before)
    assert changed == ["kvfleet-autoscaling", "kvfleet-worker"], "their pods are rolled"


def test_the_readme_makes_every_secret_that_is_referenced() -> None:
    """With its keys, and none that nobody reads."""
    told = (K8S / "README.md").read_text()
    made: dict[str, set[str]] = {}
    for name, flags in re.findall(
        r"create secret (?:generic|tls) ([\w-]+)((?:[^\n]|\\\n)*)", told.replace("\\\n", " ")
    ):
        keys = set(re.findall(r"--from-file=([\w.-]+)=", flags))
        made[name] = keys or ({"tls.crt", "tls.key"} if "--cert=" in flags else set())
    assert made == {name: keys or set() for name, keys in SECRETS.items()}
