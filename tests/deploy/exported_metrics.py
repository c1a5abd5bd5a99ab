"""Every metric that the processes export, with type, labels and help, from the readings that they register.

Registering reads no value, so a process is needed as far only as readings look into it when they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from kvfleet.ingress.auth.access import Access
from kvfleet.ingress.ingress import Ingress
from kvfleet.ingress.telemetry.metrics import IngressMetrics
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.placement_metrics import readings as placement_readings
from kvfleet.placement.workers.prompts import HashedPrompts
from kvfleet.vault.vault_metrics import readings as vault_readings
from kvfleet.worker.model.device_watch import CpuWatch
from kvfleet.worker.own_metrics import own_readings
from kvfleet.worker.port.tenant_costs import TenantCosts
from kvfleet.worker.vllm_metrics import vllm_readings
from kvfleet.worker.worker_metrics import readings as worker_readings
from kvservice.distribution import Distribution
from kvservice.metrics import LiveCollector, Reading, common_readings

PROCESS = {  # of prometheus_client's ProcessCollector: it collects values only
    "process_virtual_memory_bytes": "gauge",
    "process_resident_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge",
    "process_cpu_seconds_total": "counter",
    "process_open_fds": "gauge",
    "process_max_fds": "gauge",
}


@dataclass(frozen=True, slots=True)
class Exported:
    name: str  # as queries call it; of a histogram without its suffixes
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


class _Whatever:
    """A process, as far as readings look at it when they are made."""

    def __getattr__(self, name: str) -> Any:
        return _Whatever()


def by_process() -> dict[str, dict[str, Exported]]:
    """Of each service its own metrics, and under `every` those of all."""
    nats = _whatever()
    found = {
        "ingress": _of_ingress(),
        "placement": _named(_described(placement_readings(_placement(), nats))),
        "worker": _named(_described(_worker_readings(nats))),
        "vault": _named(_described(vault_readings(_vault(), nats, None))),
    }
    common = _named(_described(common_readings("role", nats, {})))
    for own in found.values():
        for name in common:
            own.pop(name, None)
    process = {name: Exported(name, kind, (), "") for name, kind in PROCESS.items()}
    return found | {"every": common | process}


def exported() -> dict[str, Exported]:
    return {name: metric for of_one in by_process().values() for name, metric in of_one.items()}


def _whatever() -> Any:
    return _Whatever()


def _placement() -> Any:
    core = PlacementCore("p0", "_plc.p0", lambda: 0.5, prompts=HashedPrompts(None), unix_ms=lambda: 0)
    parts = {name: _whatever() for name in ("executor", "subscriptions", "question_desk", "desk")}
    return SimpleNamespace(core=core, **parts)


def _worker_readings(nats: Any) -> list[Reading]:
    engine = _engine()
    record = SimpleNamespace(id="w0", model="demo", block_bytes=1)
    worker: Any = SimpleNamespace(record=record, parts=SimpleNamespace(engine=engine))
    server: Any = SimpleNamespace()
    both = own_readings(worker, engine, CpuWatch()) + vllm_readings(worker, server)
    return worker_readings(worker, nats) + list({one.name: one for one in both}.values())


def _engine() -> Any:
    counters = SimpleNamespace(costs=TenantCosts(), queue_waits=Distribution())
    return SimpleNamespace(cancel_to_free=Distribution(), counters=counters)


def _vault() -> Any:
    return SimpleNamespace(store=_whatever(), server=_whatever(), states=_whatever())


def _of_ingress() -> dict[str, Exported]:
    registry = CollectorRegistry()
    IngressMetrics(registry)
    ingress: Any = _Whatever()
    found = _named(_described([*Ingress._readings(ingress), *Access.readings(ingress)]))
    return found | {name: one for name, one in _named(registry.collect()).items() if name not in PROCESS}


def _described(readings: list[Reading]) -> list[Metric]:
    return list(LiveCollector(readings).describe())


def _named(metrics: Any) -> dict[str, Exported]:
    found = {}
    for metric in metrics:
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = metric_labels(metric)
        found[name] = Exported(name, metric.type, labels, metric.documentation)
    return found


def metric_labels(metric: Metric) -> tuple[str, ...]:
    """Those it was made with, or those of its samples."""
    made_with = getattr(metric, "_labelnames", None)
    if made_with is not None:
        return tuple(made_with)
    return tuple(dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le"))
