"""Everything that deploy/k8s renders to is sound: schemas, references, processes, hardening."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from kvfleet.ingress.app import create_app
from kvservice.metrics import MetricsServer
from tests.deploy.k8s_hardening import hardening_problems
from tests.deploy.k8s_objects import Object, environment, named, of_kind, pods
from tests.deploy.k8s_processes import PROBED, process_problems
from tests.deploy.k8s_references import reference_problems
from tests.deploy.k8s_render import OVERLAYS, combinations, gke_with_gateway, render, render_combination
from tests.deploy.k8s_schemas import schema_problems
from tests.deploy.k8s_vllm import vllm_problems

CHECKS: tuple[Callable[[Sequence[Object]], list[str]], ...] = (
    schema_problems,
    reference_problems,
    process_problems,
    hardening_problems,
    vllm_problems,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("combinations")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_sound(overlay: str) -> None:
    assert [problem for check in CHECKS for problem in check(render(overlay))] == []


@pytest.mark.parametrize("components", combinations(), ids="+".join)
def test_base_is_sound_with_components(components: tuple[str, ...], folder: Path) -> None:
    objects = render_combination(components, folder)
    assert [problem for check in CHECKS for problem in check(objects)] == []


def test_gke_is_sound_with_a_balancer_of_requests(tmp_path: Path) -> None:
    objects = gke_with_gateway(tmp_path)
    assert [problem for check in CHECKS for problem in check(objects)] == []
    service = named(objects, "Service", "ingress")
    assert service["spec"]["type"] == "ClusterIP"
    assert not {"externalTrafficPolicy", "loadBalancerIP"} & set(service["spec"])
    assert not service["metadata"].get("annotations")


async def test_the_audit_log_has_the_client_behind_a_balancer_of_requests(folder: Path) -> None:
    """Google's proxies end X-Forwarded-For with the client and the Gateway's own address; what comes before is its."""
    objects = render_combination(("gateway-gke",), folder / "proxies")
    told = environment(named(objects, "Deployment", "ingress")["spec"]["template"]["spec"]["containers"][0], objects)
    networks = told["KVFLEET_TRUSTED_PROXIES"] or ""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    headers = [(b"x-forwarded-for", b"192.0.2.66, 203.0.113.9, 198.51.100.1")]
    for trusted, peer in (
        (networks, "35.191.4.5"),
        (f"{networks},198.51.100.1", "130.211.1.2"),
        (networks, "203.0.113.77"),
    ):
        scope: Any = {"type": "http", "client": (peer, 1), "headers": headers, "scheme": "https"}
        await ProxyHeadersMiddleware(app, trusted)(scope, None, None)  # type: ignore[arg-type]
    assert seen == ["198.51.100.1", "203.0.113.9", "203.0.113.77"]


async def test_probes_ask_for_what_is_answered() -> None:
    """By the port for metrics and probes, and, where a balancer asks the HTTP port, by the ingress's own routes."""
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, lambda: False)
    try:
        answers = {path: _status(f"http://127.0.0.1:{server.port}{path}") for path in {*PROBED.values(), "/metrics"}}
    finally:
        await server.close()
    assert answers == {"/livez": 200, "/readyz": 503, "/metrics": 200}

    class Any_:  # handlers are not called
        def __getattr__(self, name: str) -> Any:
            return self

    routes = {route.path for route in create_app(Any_()).routes}  # type: ignore[attr-defined, arg-type]
    for overlay in OVERLAYS:
        for pod in pods(render(overlay)):
            for container in pod.containers if pod.component == "ingress" else []:
                asked = {container[kind]["httpGet"]["path"] for kind in PROBED}
                assert asked <= routes


def test_a_balancer_of_requests_asks_for_what_is_answered_and_cuts_no_stream(folder: Path) -> None:
    from kvfleet.ingress.settings import IngressSettings

    objects = render_combination(("gateway-gke",), folder / "gateway")
    (policy,) = of_kind(objects, "HealthCheckPolicy")
    asked = policy["spec"]["default"]["config"]["httpsHealthCheck"]
    (ingress,) = [pod for pod in pods(objects) if pod.component == "ingress"]
    assert asked["port"] == ingress.ports()["https"]
    assert asked["requestPath"] == PROBED["readinessProbe"]
    (backend,) = of_kind(objects, "GCPBackendPolicy")
    longest = (
        IngressSettings.model_fields["request_deadline_s"].default + IngressSettings.model_fields["max_wait_s"].default
    )
    assert backend["spec"]["default"]["timeoutSec"] > longest
    noticed = policy["spec"]["default"]["checkIntervalSec"] * policy["spec"]["default"]["unhealthyThreshold"]
    data = next(one["data"] for one in of_kind(objects, "ConfigMap") if "KVFLEET_UNREADY_S" in one.get("data", {}))
    assert noticed < float(data["KVFLEET_UNREADY_S"])
    assert int(data["KVFLEET_KEEP_ALIVE_S"]) > 600, "Google's balancers keep idle connections that long"


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
