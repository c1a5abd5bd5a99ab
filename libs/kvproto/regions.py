"""Fleets that take requests from one another: names across regions, and the latest summaries of each. Pure.

A region is a whole fleet with a NATS of its own. A worker of another region is called `<region>.<worker>`, which is no
legal id. Each placement replica sends a RegionSummary once a second.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence

from kvproto.messages import RegionSummary, WorkerRecord

FRESH_S = 3.5  # how long a summary counts
SEAL_BYTES = 16
MAX_REGIONS = 256
MAX_REPLICAS = 32  # of one region's placement


def qualify(region: str, worker: str) -> str:
    """A worker's name in other regions."""
    return f"{region}.{worker}"


def split(worker: str) -> tuple[str, str]:
    """Region and id; the region is "" for a worker of the own region."""
    region, _, own = worker.rpartition(".")
    return region, own


def seal(fleet_key: bytes, source: str, addresses: Iterable[str]) -> bytes:
    """Proves that addresses of a source in another region are the fleet's: else a requester could have workers connect
    to any address. HMAC-SHA256, cut."""
    text = "\n".join(("kvfleet region source", source, *addresses))
    return hmac.new(fleet_key, text.encode(), hashlib.sha256).digest()[:SEAL_BYTES]


def link_key(fleet_key: bytes) -> bytes:
    """The data plane's key between regions, which share no bucket of keys."""
    return hmac.new(fleet_key, b"kvfleet data plane between regions", hashlib.sha256).digest()


class Regions:
    """The other regions as one process hears them; without an `own` region there are none."""

    def __init__(self, own: str) -> None:
        self.own = own
        self._heard: dict[str, dict[str, tuple[RegionSummary, float]]] = {}  # region -> placement -> last one, when

    def hear(self, summary: RegionSummary, now: float) -> None:
        if not self.own or summary.region == self.own or not summary.region:
            return
        if summary.region not in self._heard and len(self._heard) >= MAX_REGIONS:
            return
        replicas = self._heard.setdefault(summary.region, {})
        if summary.placement in replicas or len(replicas) < MAX_REPLICAS:
            replicas[summary.placement] = summary, now

    def forget_silent(self, now: float) -> None:
        for region, replicas in list(self._heard.items()):
            fresh = {name: said for name, said in replicas.items() if now - said[1] <= FRESH_S}
            if fresh:
                self._heard[region] = fresh
            else:
                del self._heard[region]

    def is_there(self, region: str) -> bool:
        """As of the last time that silent ones were forgotten."""
        return region in self._heard

    @property
    def fresh_count(self) -> int:
        """As of the last time that silent ones were forgotten."""
        return len(self._heard)

    def ready(self, model: str, now: float, excluded: Sequence[str] = ()) -> dict[str, float]:
        """Regions with a ready worker, and seconds until one would begin a request, as the slowest replica says."""
        found: dict[str, float] = {}
        for region, summary in self._fresh(now):
            for one in summary.models:
                if one.model == model and one.ready and region not in excluded:
                    found[region] = max(found.get(region, 0.0), one.wait_s)
        return found

    def records(self, now: float) -> dict[str, WorkerRecord]:
        """Each model that another region serves, with the worker of the smallest qualified name."""
        found: dict[str, tuple[str, WorkerRecord]] = {}
        for region, summary in self._fresh(now):
            for one in summary.models:
                name = qualify(region, one.record.id)
                if one.ready and (one.model not in found or name < found[one.model][0]):
                    found[one.model] = name, one.record
        return {model: record for model, (_, record) in sorted(found.items())}

    def holders(self, model: str, bundle: str, now: float) -> list[str]:
        """Qualified names of workers that have this bundle."""
        return sorted(
            qualify(region, one.record.id)
            for region, summary in self._fresh(now)
            for one in summary.models
            if one.ready and one.model == model and one.record.bundle == bundle
        )

    def workers(self, region: str, model: str, now: float) -> list[str]:
        """Qualified names of a model's workers in one region."""
        return sorted(
            {
                qualify(region, worker)
                for name, summary in self._fresh(now)
                for one in summary.models
                if name == region and one.model == model
                for worker in (one.record.id, *one.workers)
            }
        )

    def _fresh(self, now: float) -> Iterator[tuple[str, RegionSummary]]:
        for region, replicas in self._heard.items():
            for summary, at in replicas.values():
                if now - at <= FRESH_S:
                    yield region, summary
