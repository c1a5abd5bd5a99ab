"""Wiring: one ingress out of its parts, and its life: start, drain, close. No decision and no HTTP here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry

from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.config import IngressConfig
from kvfleet.ingress.fleet.other_regions import OtherRegions
from kvfleet.ingress.fleet.routes import FleetRoutes
from kvfleet.ingress.http.body_reader import BodyReader
from kvfleet.ingress.http.web_guard import WebGuard
from kvfleet.ingress.limits.admission import Admission
from kvfleet.ingress.limits.service_levels import Targets
from kvfleet.ingress.limits.shared_usage import SharedUsage
from kvfleet.ingress.limits.shared_usage_exchange import UsageExchange
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.prompts.chat_splice import SpliceIndex
from kvfleet.ingress.prompts.models import Models
from kvfleet.ingress.prompts.prompts import Prompts
from kvfleet.ingress.request_flow import RequestFlow
from kvfleet.ingress.request_reader import RequestReader
from kvfleet.ingress.runs.runs import Runs
from kvfleet.ingress.sessions.session_blocks import SessionBlocks
from kvfleet.ingress.sessions.session_index import SessionIndex
from kvfleet.ingress.sessions.sessions import Sessions
from kvfleet.ingress.sessions.turns import SessionBooks
from kvfleet.ingress.telemetry.audit import NO_AUDIT, Audit
from kvfleet.ingress.telemetry.metrics import IngressMetrics, IngressReading
from kvproto.buckets import Bucket
from kvproto.client import Client
from kvproto.errors import KvfleetError
from kvproto.ids import new_epoch
from kvproto.messages import Role
from kvservice import tracing
from kvservice.tracing import Tracer

DRAIN_POLL_S = 0.05


class Ingress:
    """All of one ingress process but its web server. `open` needs a client whose members are listed."""

    def __init__(
        self,
        client: Client,
        config: IngressConfig,
        tenancy: Tenancy,
        registry: CollectorRegistry,
        bucket: Bucket,
        audit: Audit,
        readings: Iterable[IngressReading],
        tracer: Tracer = tracing.NULL,
    ) -> None:
        self._client = client
        self._executor = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")
        self._tasks: list[asyncio.Task[Any]] = []
        self.unready = False  # set before a drain: load balancers look elsewhere, requests are still served
        self.admission = Admission(config.max_concurrent, time.time)
        self.usage = SharedUsage(self.admission.limiter, config.id, new_epoch(), client.now())
        self.usage_exchange = UsageExchange(
            client.connection, client.subjects.ingress_usage(), self.usage, client.now, time.time
        )
        self.audit = audit
        self.tenancy = tenancy
        self.guard = WebGuard(config.web, is_open=tenancy.is_open)
        self.metrics = IngressMetrics(
            registry,
            Targets(config.slo_ttft_s, config.slo_itl_s),
            lambda: [record.model for record in self.models.served()],
        )
        self.regions = OtherRegions(client.connection, client.subjects, client.now)
        self.models = Models(client, client.members.view, self._executor, self.regions)
        self.regions.on_change = self.models.on_regions
        self.splices = SpliceIndex(config.splice_bytes)
        self.session_blocks = SessionBlocks(client, self.regions.workers)
        self.sessions = Sessions(
            bucket,
            config.id,
            config.sessions,
            unix_ms=unix_ms,
            is_ingress_alive=self._is_ingress_alive,
            forget=self.session_blocks.forget,
        )
        self.session_index = SessionIndex(bucket, self.sessions, config.sessions, unix_ms=unix_ms)
        self.runs = Runs(config.runs, client.now)
        self._id = config.id
        books = SessionBooks(self.sessions, self.session_index, self.metrics.tally)
        parts = IngressParts(client, config, tenancy, self.admission, self.models, books, self.metrics)
        bodies = BodyReader(self._executor, config.max_body_bytes, config.body_timeout_s)
        reader = RequestReader(parts, bodies, self.runs, audit, tracer)
        prompts = Prompts(self.splices, self._executor, config.tokenize_inline_chars)
        self.flow = RequestFlow(parts, reader, prompts, self.runs)
        self.routes = FleetRoutes(
            parts, self.session_blocks, self.regions, lambda: self.unready or self.admission.draining
        )
        self.metrics.read_also((*self._readings(), *readings))

    @classmethod
    async def open(
        cls,
        client: Client,
        config: IngressConfig,
        tenancy: Tenancy,
        registry: CollectorRegistry,
        *,
        audit: Audit = NO_AUDIT,
        readings: Iterable[IngressReading] = (),
        tracer: Tracer = tracing.NULL,
    ) -> Ingress:
        """Build and start; `readings` are metrics of parts that were built before. Raises Unavailable when the sessions
        bucket does not exist."""
        bucket = await Bucket.open(client.connection, client.subjects.sessions_bucket)
        ingress = cls(client, config, tenancy, registry, bucket, audit, readings, tracer)
        await ingress.regions.start()
        await ingress.usage_exchange.start()
        ingress.start()
        return ingress

    def start(self) -> None:
        self._client.members.listeners.append(self.models.on_member)
        self._client.connection.on_reconnect.append(self._on_reconnect)
        self.models.start()
        self._tasks.append(asyncio.create_task(self.sessions.run(), name="session-leases"))
        self._tasks.append(asyncio.create_task(self.session_index.run(), name="session-index"))
        self._tasks.append(asyncio.create_task(self.runs.run(), name="runs"))
        self._tasks.append(asyncio.create_task(self.usage_exchange.run(), name="usage"))

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; False if some is still running after the timeout."""
        self.admission.draining = True
        end = asyncio.get_running_loop().time() + timeout_s
        while self.admission.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_POLL_S)
        return not self.admission.running

    def end_streams(self, error: KvfleetError) -> None:
        """What still runs ends with this error as its last event."""
        self._client.fail_streams(error)

    async def close(self) -> None:
        """Stop the background tasks; the client stays its owner's."""
        with contextlib.suppress(ValueError):
            self._client.members.listeners.remove(self.models.on_member)
        with contextlib.suppress(ValueError):
            self._client.connection.on_reconnect.remove(self._on_reconnect)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        await self.usage_exchange.stop()
        await self.routes.close()
        await self.session_blocks.close()
        await self.regions.stop()
        await self.models.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _on_reconnect(self) -> None:
        self.session_index.rewatch()

    def _is_ingress_alive(self, ingress: str) -> bool:
        return ingress == self._id or (Role.INGRESS, ingress) in self._client.members.view.members

    def _readings(self) -> tuple[IngressReading, ...]:
        counters, inbox, view = self._client.counters, self._client.inbox, self._client.members.view
        runs, tenancy, usage, exchange = self.runs, self.tenancy, self.usage, self.usage_exchange
        return (
            IngressReading(
                "running_requests", "Requests admitted and not yet ended.", "gauge", lambda: self.admission.running
            ),
            IngressReading(
                "refused_requests", "Refused by admission.", "counter", lambda: self.admission.refused_total
            ),
            IngressReading("refused_callers", "Refused as nobody known.", "counter", lambda: tenancy.refused_total),
            IngressReading("api_keys", "Configured API keys.", "gauge", lambda: tenancy.key_count),
            IngressReading(
                "counting_ingresses",
                "Other ingresses that told within 3 s what limited callers use there.",
                "gauge",
                lambda: usage.peers,
            ),
            IngressReading("told_usage_reports", "Reports sent to them.", "counter", lambda: exchange.sent_total),
            IngressReading("heard_usage_reports", "Reports of theirs.", "counter", lambda: exchange.received_total),
            IngressReading(
                "ignored_usage_reports",
                "Reports, or accounts in one, that were unreadable, of a life that is over, or too many.",
                "counter",
                lambda: usage.refused_total + exchange.malformed_total,
            ),
            IngressReading(
                "placed_attempts", "Attempts placed by placement.", "counter", lambda: counters.placed_total
            ),
            IngressReading(
                "placement_fallbacks",
                "Attempts placed by the ring because placement did not answer.",
                "counter",
                lambda: counters.fallback_total,
            ),
            IngressReading(
                "placement_unasked",
                "Of them, those of which placement was not even asked, as it had not answered for a while.",
                "counter",
                lambda: counters.unasked_total,
            ),
            IngressReading(
                "spilled_attempts", "Attempts placed in another region.", "counter", lambda: counters.spilled_total
            ),
            IngressReading(
                "region_refusals",
                "Other regions that could not take a request, or did not answer.",
                "counter",
                lambda: counters.region_refusals_total,
            ),
            IngressReading("lost_attempts", "Attempts whose worker was lost.", "counter", lambda: counters.lost_total),
            IngressReading(
                "resends", "Times a worker was asked for frames again.", "counter", lambda: counters.resends_total
            ),
            IngressReading("orphan_frames", "Frames for nobody.", "counter", lambda: inbox.orphan_frames_total),
            IngressReading(
                "malformed_frames", "Frames that were unreadable.", "counter", lambda: inbox.malformed_total
            ),
            IngressReading("splice_hits", "Chats whose history was known.", "counter", lambda: self.splices.hits_total),
            IngressReading(
                "splice_misses", "Chats whose history was not.", "counter", lambda: self.splices.misses_total
            ),
            IngressReading("splice_bytes", "Memory of known histories.", "gauge", lambda: self.splices.bytes_used),
            IngressReading(
                "kept_runs", "Ended and cut requests that may be asked for again.", "gauge", lambda: runs.kept
            ),
            IngressReading("kept_run_bytes", "Memory of them.", "gauge", lambda: runs.kept_bytes),
            IngressReading("running_run_bytes", "Memory of running ones.", "gauge", lambda: runs.memory.used),
            IngressReading(
                "attached_requests", "Repeats that joined a running request.", "counter", lambda: runs.attached_total
            ),
            IngressReading(
                "resumed_requests", "Repeats that went on with a cut request.", "counter", lambda: runs.resumed_total
            ),
            IngressReading(
                "replayed_requests", "Repeats of finished requests.", "counter", lambda: runs.replayed_total
            ),
            IngressReading("sessions", "Sessions of all tenants.", "gauge", lambda: self.session_index.table.total),
            IngressReading("running_turns", "Session turns running here.", "gauge", lambda: self.sessions.running),
            IngressReading(
                "ready_workers", "Workers that take new work.", "gauge", lambda: sum(1 for _ in view.ready())
            ),
        )


def unix_ms() -> int:
    return int(time.time() * 1000)
