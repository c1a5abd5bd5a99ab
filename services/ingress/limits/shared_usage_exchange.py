"""Loop: exchanges the reports of `shared_usage` with the region's other ingresses, four times a second. While NATS is
away nothing is kept to be sent later: counts only grow, so the next report has it all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvfleet.ingress.limits.shared_usage import SharedUsage
from kvproto import codec
from kvproto.connection import Connection, Message, Subscription
from kvproto.errors import CodecError, KvfleetError
from kvproto.messages import UsageReport

log = logging.getLogger(__name__)

PERIOD_S = 0.25


@dataclass(eq=False, slots=True)
class UsageExchange:
    """Owned by the event loop. `start`, then `run` until cancelled, then `stop`."""

    connection: Connection
    subject: str
    usage: SharedUsage
    now: Callable[[], float]
    unix_s: Callable[[], float]
    sent_total: int = 0
    received_total: int = 0
    malformed_total: int = 0
    _subscription: Subscription | None = None

    @property
    def ignored_total(self) -> int:
        return self.usage.refused_total + self.malformed_total

    async def start(self) -> None:
        self._subscription = await self.connection.subscribe(self.subject, self._on_report)
        self.connection.on_reconnect.append(self._on_reconnect)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.turn()
            except Exception:  # a loop's top: others would take what runs here for over
                log.exception("usage of limits not told")

    async def stop(self) -> None:
        """Reports once more, so that the others need not wait for this one's silence."""
        if self._on_reconnect in self.connection.on_reconnect:
            self.connection.on_reconnect.remove(self._on_reconnect)
        await self.turn()
        subscription, self._subscription = self._subscription, None
        if subscription is not None and self.connection.is_connected:
            await subscription.unsubscribe()

    async def turn(self) -> None:
        now = self.now()
        self.usage.expire(now)
        if not self.connection.is_connected or self.connection.is_silent:
            return
        try:
            for report in self.usage.reports(now, self.unix_s(), self.connection.max_payload):
                await self.connection.publish(self.subject, codec.encode(report))
                self.sent_total += 1
        except KvfleetError as error:  # the next report follows within a second
            log.debug("usage of limits not told: %s", error)

    async def _on_report(self, message: Message) -> None:
        try:
            report = codec.decode(UsageReport, message.data)
        except CodecError as error:
            self.malformed_total += 1
            log.debug("a report on %s is unreadable: %s", message.subject, error)
            return
        self.usage.receive(report, self.now(), self.unix_s())
        self.received_total += 1

    async def _on_reconnect(self) -> None:
        self.usage.report_again()
