"""Loop: reports to the other ingresses of the region what limited callers use here, four times a second while there is
something to report, and receives their reports. What is in them and what follows from it is `shared_usage`'s.

While NATS is away this ingress counts alone, and nothing is kept to be sent later: counts only grow, so the next report
says it all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvfleet.ingress.limits.shared_usage import SharedUsage
from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError, KvfleetError
from kvproto.messages import UsageReport
from kvproto.nats_message import Message, Subscription

log = logging.getLogger(__name__)

PERIOD_S = 0.25


class UsageExchange:
    """Owned by the event loop. `start`, then `run` until cancelled, then `stop`."""

    def __init__(
        self,
        connection: Connection,
        subject: str,
        usage: SharedUsage,
        now: Callable[[], float],
        unix_s: Callable[[], float],
    ) -> None:
        self.sent_total = 0
        self.received_total = 0
        self.malformed_total = 0
        self._connection = connection
        self._subject = subject
        self._usage = usage
        self._now = now
        self._unix_s = unix_s
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._connection.subscribe(self._subject, self._on_report)
        self._connection.on_reconnect.append(self._on_reconnect)

    async def run(self) -> None:
        """Report, for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.turn()
            except Exception:  # a loop's top: others would take what runs here for over
                log.exception("usage of limits not told")

    async def stop(self) -> None:
        """What has ended since the last report is reported: those that go on need not wait for this one's silence."""
        if self._on_reconnect in self._connection.on_reconnect:
            self._connection.on_reconnect.remove(self._on_reconnect)
        await self.turn()
        subscription, self._subscription = self._subscription, None
        if subscription is not None and self._connection.is_connected:
            await subscription.unsubscribe()

    async def turn(self) -> None:
        now = self._now()
        self._usage.expire(now)
        if not self._connection.is_connected or self._connection.is_silent:
            return
        try:
            for report in self._usage.reports(now, self._unix_s(), self._connection.max_payload):
                await self._connection.publish(self._subject, codec.encode(report))
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
        self._usage.receive(report, self._now(), self._unix_s())
        self.received_total += 1

    async def _on_reconnect(self) -> None:
        self._usage.report_again()
