"""Loop: what other regions serve, as their placements say once a second. Without a region of its own it hears none.

A model that only another region serves can be asked for here all the same: its tokenizer is fetched from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError, KvfleetError
from kvproto.messages import RegionSummary, WorkerRecord
from kvproto.nats_message import Message, Subscription
from kvproto.regions import Regions
from kvproto.subjects import Subjects

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class OtherRegions:
    """Owned by the event loop. `on_change` is called after each summary of another region: what could not be had
    of it before is tried again then."""

    connection: Connection
    subjects: Subjects
    now: Callable[[], float]
    on_change: Callable[[], None] = lambda: None
    subscription: Subscription | None = None
    regions: Regions = field(init=False)

    def __post_init__(self) -> None:
        self.regions = Regions(self.subjects.region)

    async def start(self) -> None:
        if self.subjects.region:
            self.subscription = await self.connection.subscribe(self.subjects.region_summaries(), self._on_summary)

    async def stop(self) -> None:
        if self.subscription is not None:
            try:
                await self.subscription.unsubscribe()
            except KvfleetError as error:  # the connection may be gone: nothing to let go of then
                log.debug("other regions: %s", error)

    def names(self) -> list[str]:
        return self.regions.names(self.now())

    def records(self) -> dict[str, WorkerRecord]:
        """A worker's record for each model that some other region serves now."""
        return self.regions.records(self.now())

    def holders(self, model: str, bundle: str) -> list[str]:
        return self.regions.holders(model, bundle, self.now())

    def workers(self, region: str, model: str) -> list[str]:
        """All workers of a model there, called as from here."""
        return self.regions.workers(region, model, self.now())

    async def _on_summary(self, message: Message) -> None:
        try:
            summary = codec.decode(RegionSummary, message.data)
        except CodecError as error:
            log.debug("a summary on %s is unreadable: %s", message.subject, error)
            return
        if message.subject.split(".")[-2] != summary.region or summary.region == self.subjects.region:
            return
        now = self.now()
        self.regions.hear(summary, now)
        self.regions.forget_silent(now)
        self.on_change()
