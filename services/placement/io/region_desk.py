"""Loop: what placement says to other regions and hears from them. Owns the one timer; the loop subscribes.

kvf.region.<own>.summary                       ◀── once a second: which models, how long a wait
kvf.region.*.summary                           ──▶ the core's `region_summaries`
kvf.region.<own>.{place,generate}.<tenant>.*   ──▶ as `kvf.place` and `kvf.generate`, but never referred again
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from kvfleet.placement.core import PlacementCore
from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError, KvfleetError
from kvproto.members import Members
from kvproto.messages import Placement, PlaceRequest, RegionModel, RegionSummary, State
from kvproto.nats_message import Message
from kvproto.regions import qualify, seal
from kvproto.subjects import Subjects

log = logging.getLogger(__name__)

SUMMARY_S = 1.0
MAX_WORKERS = 4096  # of a model that are named


class RegionDesk:
    """Of one placement replica in a region."""

    def __init__(
        self,
        placement: str,
        connection: Connection,
        subjects: Subjects,
        core: PlacementCore,
        members: Members,
        fleet_key: bytes | None,
    ) -> None:
        self.malformed_total = 0
        self._placement = placement
        self._connection = connection
        self._subjects = subjects
        self._core = core
        self._members = members
        self._fleet_key = fleet_key

    async def run(self) -> None:
        """Say what this region can do, until cancelled."""
        while True:
            try:
                summary = codec.encode(self.summary(asyncio.get_running_loop().time()))
                await self._connection.publish(self._subjects.region_summary(self._subjects.region), summary)
            except KvfleetError as error:
                log.warning("placement: other regions were not told: %s", error)
            await asyncio.sleep(SUMMARY_S)

    async def leave(self) -> None:
        """This replica takes nothing more: the others know it now, not when they miss its word. Never raises."""
        last = codec.encode(RegionSummary(self._subjects.region, self._placement))
        try:
            await self._connection.publish(self._subjects.region_summary(self._subjects.region), last)
        except KvfleetError as error:
            log.debug("placement: other regions were not told of the end: %s", error)

    def summary(self, now: float) -> RegionSummary:
        """Of every model that is served here; `data_plane` and what only a region's own need is left out."""
        models = []
        for model, record in sorted(self._members.view.models().items()):
            ask = PlaceRequest(request="", model=model)
            ready = self._core.fleet.ready(model).workers
            wait_s = self._core.decider.least_wait_s(ask, now)
            slim = replace(record, address="", data_plane=(), pid=0)
            models.append(RegionModel(model, len(ready), min(wait_s or 0.0, 1e9), slim, self._workers(model)))
        return RegionSummary(self._subjects.region, self._placement, tuple(models))

    def _workers(self, model: str) -> tuple[str, ...]:
        """Those that answer: whom other regions ask to forget a session."""
        view = self._members.view
        serving = (
            one.record.id
            for one in view.workers.values()
            if one.record.model == model and one.dead_since is None and one.state in (State.READY, State.DRAINING)
        )
        return tuple(sorted(serving))[:MAX_WORKERS]

    def with_addresses(self, placement: Placement) -> Placement:
        """A source of this region as a worker elsewhere can reach it; without one that can be reached, none."""
        view = self._members.view.workers.get(placement.source)
        addresses = tuple(one for one in view.record.data_plane if one.startswith("tcp:")) if view else ()
        if not addresses or not self._fleet_key:
            return replace(placement, source="", source_tokens=0)
        source = qualify(self._subjects.region, placement.source)
        sealed = seal(self._fleet_key, source, addresses)
        return replace(placement, source=source, source_addresses=addresses, source_seal=sealed)

    async def on_summary(self, message: Message) -> None:
        try:
            summary = codec.decode(RegionSummary, message.data)
        except CodecError as error:
            self.malformed_total += 1
            log.debug("placement: a summary on %s is unreadable: %s", message.subject, error)
            return
        if message.subject.split(".")[-2] == summary.region:
            self._core.region_summaries.regions.hear(summary, asyncio.get_running_loop().time())
