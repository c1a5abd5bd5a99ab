"""The chart and kustomize make the same fleet, and all that the chart makes is sound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvfleet import __version__
from tests.deploy.helm_render import CHART, VALUES, comparable, refused, run_helm, template
from tests.deploy.k8s_objects import Object, environment, named, of_kind, pods
from tests.deploy.k8s_render import OVERLAYS, ROOT, render, render_combination
from tests.deploy.k8s_schemas import SCHEMAS, schema_problems
from tests.deploy.test_k8s_renders import CHECKS

COMPONENTS = {
    "vault": ("--set=vault.enabled=true",),
    "hub": ("--set=hub.enabled=true",),
    "producers": ("--set=producers.enabled=true",),
    "monitoring": ("--set=monitoring.operator=prometheus",),
    "monitoring-gke": ("--set=monitoring.operator=google",),
    "keda": ("--set=autoscaling.enabled=true",),
    "tracing": ("--set=tracing.endpoint=http://opentelemetry-collector.observability.svc:4318",),
    "vllm": (
        "--set=worker.engine=vllm,worker.gpu.count=1,worker.stateSize=100Gi,worker.model=Qwen/Qwen2.5-7B-Instruct",
        "--set=worker.servedModelName=qwen2.5-7b-instruct,worker.resources.requests.memory=2Gi",
        "--set-string=worker.resources.requests.cpu=1",
        "--set=worker.resources.limits.memory=12Gi",
    ),
}
OLDEST = 29  # of the chart's kubeVersion
SUPPORTED = [
    version for minor in range(OLDEST, 100) if (SCHEMAS / f"v{(version := f'1.{minor}')}.0-local-strict").is_dir()
]


def rendered(name: str, kubernetes: str = "1.34") -> list[Object]:
    return template("--values", VALUES[name], kubernetes=kubernetes)


def worker(objects: list[Object], name: str = "worker") -> Object:
    spec: Object = named(objects, "StatefulSet", name)["spec"]["template"]["spec"]
    return spec


def test_templates_and_readme_are_those_of_the_manifests() -> None:
    done = subprocess.run(
        [sys.executable, CHART.parent / "make_chart", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), "run deploy/helm/make_chart"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_the_chart_with_its_values(overlay: str) -> None:
    assert comparable(rendered(overlay)) == comparable(render(overlay))


@pytest.mark.parametrize(
    "components", [(), *((name,) for name in COMPONENTS), ("vault", "hub", "keda", "tracing", "monitoring")],
    ids=lambda names: "+".join(names) or "base",
)  # fmt: skip
def test_a_component_is_a_value(components: tuple[str, ...], tmp_path: Path) -> None:
    flags = [flag for name in components for flag in COMPONENTS[name]]
    assert comparable(template("--set=image.tag=tested", *flags)) == comparable(
        render_combination(components, tmp_path)
    )


@pytest.mark.parametrize("name", VALUES)
def test_what_the_chart_makes_is_sound(name: str) -> None:
    assert [problem for check in CHECKS for problem in check(rendered(name))] == []


@pytest.mark.parametrize("kubernetes", SUPPORTED)
def test_each_version_of_kubernetes_knows_all_fields(kubernetes: str) -> None:
    for name in VALUES:
        assert schema_problems(rendered(name, kubernetes), (kubernetes,)) == [], name


def test_an_older_kubernetes_is_refused() -> None:
    chart = run_helm("show", "chart", CHART).stdout
    assert f"kubeVersion: '>=1.{OLDEST}.0-0'" in chart
    assert "incompatible with Kubernetes v1.28.0" in refused(kubernetes="1.28.0")


@pytest.mark.parametrize("name", [None, *VALUES])
def test_helm_finds_nothing_to_say(name: str | None) -> None:
    done = run_helm("lint", "--strict", CHART, *([f"--values={VALUES[name]}"] if name else []))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


def test_the_chart_is_of_this_version() -> None:
    said = run_helm("show", "chart", CHART).stdout.splitlines()
    assert {f"version: {__version__}", f"appVersion: {__version__}"} <= set(said)


def test_a_packaged_chart_is_the_same(tmp_path: Path) -> None:
    """Though in the folder some files are links to those of NATS outside Kubernetes."""
    done = run_helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    assert template(chart=tmp_path / f"kvfleet-{__version__}.tgz") == template()


def test_a_slice_of_a_card_for_each_worker_of_a_pool() -> None:
    objects = rendered("mig")
    for pool, slice_ in (("worker", "nvidia.com/mig-1g.10gb"), ("medium", "nvidia.com/mig-3g.40gb")):
        (container,) = worker(objects, pool)["containers"]
        for kind in ("requests", "limits"):
            assert {key: value for key, value in container["resources"][kind].items() if "nvidia" in key} == {
                slice_: "1"
            }
        assert environment(container, objects)["KVFLEET_DEVICE"] == "cuda"
    budgets = {
        one["metadata"]["name"]: one["spec"]["maxUnavailable"] for one in of_kind(objects, "PodDisruptionBudget")
    }
    assert (budgets["worker"], budgets["medium"]) == ("25%", "25%")


def test_a_model_over_several_cards_has_them_and_shared_memory() -> None:
    objects = rendered("multi-gpu")
    assert {pod.owner["metadata"]["name"] for pod in pods(objects) if pod.component == "worker"} == {"small", "large"}
    own, server = worker(objects, "small"), worker(objects, "large")
    assert own["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert environment(own["containers"][0], objects)["KVFLEET_TENSOR_PARALLEL_SIZE"] == "2"
    (vllm,) = server["initContainers"]
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"--tensor-parallel-size=4", "--max-model-len=32768"} <= set(vllm["args"])
    assert "nvidia.com/gpu" not in server["containers"][0]["resources"]["limits"]
    for container in (own["containers"][0], vllm):
        assert "/dev/shm" in [one["mountPath"] for one in container["volumeMounts"]]
    assert own["nodeSelector"] != server["nodeSelector"]


def test_pools_are_told_apart_in_all_that_selects_pods() -> None:
    objects = rendered("multi-gpu")
    for pool in ("small", "large"):
        for kind in ("StatefulSet", "PodDisruptionBudget"):
            selected = named(objects, kind, pool)["spec"]["selector"]["matchLabels"]
            assert selected["kvfleet.dev/pool"] == pool
        assert named(objects, "Service", pool)["spec"]["selector"]["kvfleet.dev/pool"] == pool
        (spread,) = worker(objects, pool)["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"]["kvfleet.dev/pool"] == pool
        assert spread["whenUnsatisfiable"] == "DoNotSchedule"


def test_an_existing_nats_is_asked_and_none_made() -> None:
    objects = rendered("existing-nats")
    assert not {"nats", "init"} & {one["metadata"]["name"] for one in of_kind(objects, "StatefulSet", "Service")}
    (job,) = of_kind(objects, "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == ["init", "--replicas", "1"]
    for pod in pods(objects):
        assert environment(pod.main, objects)["KVFLEET_NATS_URL"] == "tls://nats.messaging.svc:4222"
    elsewhere = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "messaging"}}}]
    for role in ("ingress", "placement", "worker", "init", "vault"):
        assert named(objects, "NetworkPolicy", role)["spec"]["egress"][0] == {
            "to": elsewhere,
            "ports": [{"protocol": "TCP", "port": 4222}],
        }


def test_the_pools_of_the_docs_are_pools(tmp_path: Path) -> None:
    (block,) = [one for one in (ROOT / "docs/helm.md").read_text().split("```") if "\npools:" in one]
    (tmp_path / "values.yaml").write_text(block)
    objects = template("--values", tmp_path / "values.yaml")
    assert {pod.owner["metadata"]["name"] for pod in pods(objects) if pod.component == "worker"} == {"small", "slices"}
    assert [problem for check in CHECKS for problem in check(objects)] == []


def test_secrets_are_those_that_exist() -> None:
    objects = template("--set=secrets.apiKeys=keys-of-mine")
    assert of_kind(objects, "Secret") == []
    volume = next(one for one in named(objects, "Deployment", "ingress")["spec"]["template"]["spec"]["volumes"])
    mounted = [source["secret"]["name"] for source in volume["projected"]["sources"]]
    assert mounted == ["kvfleet-nkeys", "kvfleet-node-tls", "kvfleet-fleet-key", "keys-of-mine", "kvfleet-ingress-tls"]


def rolled(*flags: str) -> set[str]:
    """The workloads whose pods change with these flags."""
    before, after = template("--set=vault.enabled=true"), template("--set=vault.enabled=true", *flags)
    then = {pod.name: pod.owner["spec"]["template"] for pod in pods(before)}
    return {pod.name for pod in pods(after) if then.get(pod.name) != pod.owner["spec"]["template"]}


def test_a_setting_rolls_the_pods_that_read_it() -> None:
    assert rolled("--set-string=placement.settings.KVFLEET_LOG_LEVEL=debug") == {"Deployment/placement"}
    assert rolled("--set-string=ingress.settings.KVFLEET_LOG_LEVEL=debug") == {"Deployment/ingress"}
    assert rolled("--set-string=worker.settings.KVFLEET_LOG_LEVEL=debug") == {"StatefulSet/worker"}
    assert rolled("--set-string=vault.settings.KVFLEET_LOG_LEVEL=debug") == {"StatefulSet/vault"}
    of_services = {"Deployment/ingress", "Deployment/placement", "StatefulSet/worker", "StatefulSet/vault"}
    assert rolled("--set-string=settings.KVFLEET_LOG_LEVEL=debug") == of_services


def test_the_init_job_has_another_name_when_it_is_another() -> None:
    """A Job is never changed in place."""
    names = {
        named_job["metadata"]["name"]
        for flags in ([], ["--set=image.tag=next"], ["--set=nats.replicas=1"], ["--set=placement.nodeSelector.a=b"])
        for named_job in of_kind(template(*flags), "Job")
    }
    assert len(names) == 4
