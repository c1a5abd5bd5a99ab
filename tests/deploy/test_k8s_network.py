"""NetworkPolicies admit the arrows of a request's life, and not one more: every pair, every port, computed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from tests.deploy.k8s_network import OTHERS, Arrow, arrows
from tests.deploy.k8s_objects import named
from tests.deploy.k8s_render import copied, render, render_combination, render_or_fail

# Pods in our namespace that are none of the fleet's (a stranger, a producer) may do nothing, as everybody by default.
BASE: set[Arrow] = {
    *((party.name, "ingress", "TCP 8080") for party in OTHERS if not party.ours),
    *((role, "nats", "TCP 4222") for role in ("ingress", "placement", "worker", "init")),
    ("nats", "nats", "TCP 6222"),
    ("worker", "worker", "TCP 7400"),
    *(
        (role, "dns", f"{protocol} 53")
        for role in ("ingress", "placement", "worker", "nats", "init")
        for protocol in ("UDP", "TCP")
    ),
}
VAULT: set[Arrow] = {
    ("vault", "nats", "TCP 4222"),
    ("worker", "vault", "TCP 7400"),
    ("vault", "dns", "UDP 53"),
    ("vault", "dns", "TCP 53"),
}
SERVICES = ("ingress", "placement", "worker", "vault")
COLLECTORS: set[Arrow] = {
    (collector, role, "TCP 9090") for collector in ("collector", "collector-autopilot") for role in SERVICES
}
HUB: set[Arrow] = {("worker", outside, "TCP 443") for outside in ("internet", "client")}
DNS_CACHE: set[Arrow] = {
    (role, cache, f"{protocol} 53")
    for role in (*SERVICES, "nats", "init")
    for cache in ("dns-cache", "dns-cache-address")
    for protocol in ("UDP", "TCP")
}


def test_local() -> None:
    assert arrows(render("local")) == BASE | VAULT


def test_gke_gpu() -> None:
    assert arrows(render("gke-gpu")) == BASE | VAULT | COLLECTORS | HUB | DNS_CACHE


def test_vllm() -> None:
    """Its ports are the pod's own."""
    assert arrows(render("vllm")) == BASE | HUB


def test_with_the_prometheus_operator(tmp_path: Path) -> None:
    scraped: set[Arrow] = {("prometheus", role, "TCP 9090") for role in SERVICES}
    assert arrows(render_combination(("vault", "monitoring"), tmp_path)) == BASE | VAULT | scraped


def test_with_producers(tmp_path: Path) -> None:
    """Those with the label, here and in namespaces with theirs; NATS alone, and where its name is looked up."""
    more: set[Arrow] = {
        ("producer", "nats", "TCP 4222"),
        ("producer-elsewhere", "nats", "TCP 4222"),
        ("producer", "dns", "UDP 53"),
        ("producer", "dns", "TCP 53"),
    }
    assert arrows(render_combination(("producers",), tmp_path)) == BASE | more


def test_gke_with_producers_looks_names_up_on_the_node(tmp_path: Path) -> None:
    file = copied(tmp_path) / "overlays" / "gke-gpu" / "kustomization.yaml"
    file.write_text(file.read_text().replace("components:\n", "components:\n  - ../../components/producers\n"))
    found = arrows(render_or_fail(file.parent))
    assert {("producer", "dns-cache", "UDP 53"), ("producer", "dns-cache-address", "TCP 53")} <= found
    assert found >= BASE | VAULT | COLLECTORS | HUB | DNS_CACHE


def test_with_tracing(tmp_path: Path) -> None:
    more: set[Arrow] = {(role, "collector-of-traces", "TCP 4318") for role in SERVICES}
    assert arrows(render_combination(("vault", "tracing"), tmp_path)) == BASE | VAULT | more


@pytest.mark.parametrize("policy", ["default-deny", "dns", "ingress", "placement", "worker", "nats", "init", "vault"])
def test_each_policy_counts(policy: str) -> None:
    """Without it there are other arrows: more, or fewer."""
    kept = [one for one in render("local") if (one["kind"], one["metadata"]["name"]) != ("NetworkPolicy", policy)]
    if policy == "default-deny":
        more = arrows(kept) - BASE - VAULT
        assert ("client", "stranger", "TCP 22") in more, "of pods that no other policy selects"
    else:
        assert arrows(kept) != BASE | VAULT


def test_one_arrow_more_is_seen() -> None:
    objects = deepcopy(list(render("local")))
    admits = named(objects, "NetworkPolicy", "vault")["spec"]["ingress"][0]["from"]
    admits.append({"podSelector": {"matchLabels": {"app.kubernetes.io/component": "ingress"}}})
    assert arrows(objects) == BASE | VAULT, "who may not leave does not arrive"
    leaves = named(objects, "NetworkPolicy", "ingress")["spec"]["egress"]
    leaves.append({"to": [{"podSelector": {}}], "ports": [{"port": 7400}]})
    assert arrows(objects) - BASE - VAULT == {("ingress", "vault", "TCP 7400")}


def test_a_patch_that_matches_nothing_is_seen(tmp_path: Path) -> None:
    """kustomize drops it without a word."""
    k8s = copied(tmp_path)
    overlay = k8s / "overlays" / "gke-gpu" / "kustomization.yaml"
    text = overlay.read_text()
    assert "name: dns|producer-dns }" in text
    overlay.write_text(text.replace("name: dns|producer-dns }", "name: dsn }"))
    assert arrows(render_or_fail(overlay.parent)) == (BASE | VAULT | COLLECTORS | HUB)
