"""Loop: what placement tells other regions and hears from them.

kvf.region.<own>.summary                       ◀── once a second: which models, how long a wait
kvf.region.*.summary                           ──▶ the core's `region_summaries`
kvf.region.<own>.{place,generate}.<tenant>.*   ──▶ as `kvf.place` and `kvf.generate`, but never referred again
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.io.replica import Replica
from kvproto import codec
from kvproto.connection import Message
from kvproto.errors import CodecError, KvfleetError
from kvproto.members import Members
from kvproto.messages import PlaceRequest, RegionModel, RegionSummary, State

log = logging.getLogger(__name__)

SUMMARY_S = 1.0
MAX_WORKERS = 4096  # of a model that are named


@dataclass(eq=False, slots=True)
class RegionDesk:
    replica: Replica
    core: PlacementCore
    members: Members

    async def run(self) -> None:
        """Tell the others, until cancelled."""
        while True:
            try:
                await self._say(self.summary(self.replica.now()))
            except KvfleetError as error:
                log.warning("placement: other regions were not told: %s", error)
            await asyncio.sleep(SUMMARY_S)

    async def leave(self) -> None:
        """Tell the others now that this replica takes nothing more. Never raises."""
        try:
            await self._say(RegionSummary(self.replica.subjects.region, self.core.placement))
        except KvfleetError as error:
            log.debug("placement: other regions were not told of the end: %s", error)

    async def _say(self, summary: RegionSummary) -> None:
        subject = self.replica.subjects.region_summary(summary.region)
        await self.replica.connection.publish(subject, codec.encode(summary))

    def summary(self, now: float) -> RegionSummary:
        """Of every model served here; what other regions do not need of its record is left out."""
        models = []
        for model, record in sorted(self.members.view.models().items()):
            ready = self.core.fleet.ready(model).workers
            wait_s = self.core.decider.least_wait_s(PlaceRequest(request="", model=model), now)
            slim = replace(record, address="", data_plane=(), pid=0)
            models.append(RegionModel(model, len(ready), min(wait_s or 0.0, 1e9), slim, self._workers(model)))
        return RegionSummary(self.replica.subjects.region, self.core.placement, tuple(models))

    def _workers(self, model: str) -> tuple[str, ...]:
        """The living ones: other regions ask them to forget a session."""
        serving = (
            one.record.id
            for one in self.members.view.workers.values()
            if one.record.serves(model) and one.dead_since is None and one.state in (State.READY, State.DRAINING)
        )
        return tuple(sorted(serving))[:MAX_WORKERS]

    async def on_summary(self, message: Message) -> None:
        try:
            summary = codec.decode(RegionSummary, message.data)
        except CodecError as error:
            log.debug("placement: a summary on %s is unreadable: %s", message.subject, error)
            return
        if message.subject.split(".")[-2] == summary.region:
            self.core.region_summaries.regions.hear(summary, self.replica.now())
