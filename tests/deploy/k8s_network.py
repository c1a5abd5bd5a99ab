"""Who may open a connection to whom, by all NetworkPolicies together, as the API defines it: computed, not read off."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.deploy.k8s_objects import Labels, Object, of_kind, pods, selects

NAMESPACE = "kvfleet"
ELSEWHERE = (22, 80, 443, 6443, 10250)  # ports that nothing of the fleet listens on


@dataclass(frozen=True)
class Party:
    """One end of a connection. Without labels it is no pod but an address; `listens` is what is tried there."""

    name: str
    address: str
    namespace: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    ports: tuple[tuple[str, int], ...] = ()
    marks: tuple[tuple[str, str], ...] = ()  # further labels of its namespace

    @property
    def ours(self) -> bool:
        return self.namespace == NAMESPACE

    @property
    def label(self) -> Labels:
        return dict(self.labels)


PRODUCER = (("kvfleet.dev/producer", "acme"),)
ADMITTED = (("kvfleet.dev/producers", "true"),)  # of a namespace

# Those beside the fleet: who should get through, who looks alike, and who has no business here.
OTHERS = (
    Party("client", "203.0.113.9"),
    Party("internet", "198.51.100.7"),
    Party("metadata", "169.254.169.254"),
    Party("dns-cache-address", "169.254.20.10"),
    Party("api-server", "172.16.0.18"),
    Party("node", "10.10.0.4"),
    Party("dns", "10.20.9.1", "kube-system", (("k8s-app", "kube-dns"),)),
    Party("dns-cache", "10.20.9.6", "kube-system", (("k8s-app", "node-local-dns"),)),
    Party("prometheus", "10.20.9.2", "monitoring", (("app.kubernetes.io/name", "prometheus"),)),
    Party("prometheus-elsewhere", "10.20.9.3", "default", (("app.kubernetes.io/name", "prometheus"),)),
    Party("collector", "10.20.9.7", "gmp-system", (("app.kubernetes.io/name", "collector"),)),
    Party("collector-autopilot", "10.20.9.8", "gke-gmp-system", (("app.kubernetes.io/name", "collector"),)),
    Party("worker-elsewhere", "10.20.9.4", "default", (("app.kubernetes.io/name", "kvfleet"),
                                                       ("app.kubernetes.io/component", "worker"))),
    Party("collector-of-traces", "10.20.9.9", "observability", (("app.kubernetes.io/name", "opentelemetry-collector"),),
          (("otlp-http", 4318),)),
    Party("producer", "10.20.9.10", NAMESPACE, PRODUCER),
    Party("producer-elsewhere", "10.20.9.11", "acme", PRODUCER, (), ADMITTED),
    Party("producer-unknown", "10.20.9.12", "default", PRODUCER),
    Party("neighbour-of-producers", "10.20.9.13", "acme", (("app", "other"),), (), ADMITTED),
    Party("stranger", "10.20.9.5", NAMESPACE, (("app", "stranger"),)),
)  # fmt: skip

Arrow = tuple[str, str, str]  # from, to, "TCP 4222"


def parties(objects: Sequence[Object]) -> list[Party]:
    ours = [
        Party(
            pod.component,
            f"10.20.0.{position + 1}",
            pod.owner["metadata"]["namespace"],
            tuple(pod.labels.items()),
            tuple(pod.ports().items()),
        )
        for position, pod in enumerate(pods(objects))
    ]
    return [*ours, *OTHERS]


def arrows(objects: Sequence[Object]) -> set[Arrow]:
    """Every connection that begins or ends in the fleet's namespace and gets through, of all ports in use."""
    everybody = parties(objects)
    policies = of_kind(objects, "NetworkPolicy")
    rules = {(party, way): _rules(party, policies, way) for party in everybody for way in ("Ingress", "Egress")}
    used = {number for party in everybody for _, number in party.ports}
    tried = [("TCP", port) for port in sorted({53, *ELSEWHERE, *used})] + [("UDP", port) for port in (53, 4222, 443)]
    return {
        (one.name, other.name, f"{protocol} {port}")
        for one in everybody
        for other in everybody
        if one.ours or other.ours
        for leaves in [_towards(rules[one, "Egress"], "to", other)]
        for enters in [_towards(rules[other, "Ingress"], "from", one)]
        for protocol, port in tried
        if _admits(leaves, other, protocol, port) and _admits(enters, other, protocol, port)
    }


def _rules(party: Party, policies: Iterable[Object], way: str) -> list[Object] | None:
    """What is admitted this way; None where no policy selects the party: then everything is."""
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == party.namespace
        and way in policy["spec"].get("policyTypes", ["Ingress"])
        and selects(policy["spec"]["podSelector"], party.label)
    ]
    if not party.ours or not selecting:
        return None
    return [rule for spec in selecting for rule in spec.get(way.lower(), [])]


def _towards(rules: list[Object] | None, end: str, peer: Party) -> list[Object] | None:
    return None if rules is None else [rule for rule in rules if _peer(rule.get(end), peer)]


def _admits(rules: list[Object] | None, target: Party, protocol: str, port: int) -> bool:
    return rules is None or any(_port(rule.get("ports"), target, protocol, port) for rule in rules)


def _peer(peers: Sequence[Object] | None, party: Party) -> bool:
    return not peers or any(_is(peer, party) for peer in peers)


def _is(peer: Object, party: Party) -> bool:
    if block := peer.get("ipBlock"):
        address = ipaddress.ip_address(party.address)
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(part) for part in block.get("except", []))
    if party.namespace is None:
        return False
    if "namespaceSelector" in peer:
        if not selects(
            peer["namespaceSelector"], {"kubernetes.io/metadata.name": party.namespace, **dict(party.marks)}
        ):
            return False
    elif not party.ours:
        return False
    return selects(peer.get("podSelector", {}), party.label)


def _port(ports: Sequence[Object] | None, target: Party, protocol: str, port: int) -> bool:
    if not ports:
        return True
    for wanted in ports:
        if wanted.get("protocol", "TCP") != protocol:
            continue
        number = dict(target.ports).get(wanted["port"]) if isinstance(wanted.get("port"), str) else wanted.get("port")
        if "port" not in wanted or (number is not None and number <= port <= wanted.get("endPort", number)):
            return True
    return False
