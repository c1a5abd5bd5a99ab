"""Wiring: builds one ingress of its parts, starts, drains and closes it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry

from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.batches.batches import Batches
from kvfleet.ingress.fleet.routes import FleetRoutes
from kvfleet.ingress.fleet.text_routes import TextRoutes
from kvfleet.ingress.fleet.timeline import WorkerMoments
from kvfleet.ingress.http.web_guard import WebGuard
from kvfleet.ingress.limits.admission import Admission
from kvfleet.ingress.limits.shared_usage import SharedUsage
from kvfleet.ingress.limits.shared_usage_exchange import UsageExchange
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.prompts.chat_splice import SpliceIndex
from kvfleet.ingress.prompts.models import Models, OtherRegions
from kvfleet.ingress.prompts.prompts import Prompts
from kvfleet.ingress.request_flow import RequestFlow
from kvfleet.ingress.request_reader import RequestReader
from kvfleet.ingress.responses.background import Background
from kvfleet.ingress.responses.response_jobs import ResponseJobs
from kvfleet.ingress.responses.response_records import ACTIVE, ResponseRecords
from kvfleet.ingress.responses.response_routes import ResponseRoutes
from kvfleet.ingress.runs.runs import Runs
from kvfleet.ingress.sessions.pauses import ConversationPauses
from kvfleet.ingress.sessions.session_blocks import SessionBlocks
from kvfleet.ingress.sessions.session_index import HEADS, SessionIndex
from kvfleet.ingress.sessions.sessions import Sessions
from kvfleet.ingress.settings import IngressConfig
from kvfleet.ingress.telemetry.audit import NO_AUDIT, Audit
from kvfleet.ingress.telemetry.metrics import IngressMetrics
from kvfleet.ingress.telemetry.stream_courses import StreamCourses
from kvproto.buckets import Bucket, BucketFollower
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.ids import new_epoch
from kvproto.messages import Role
from kvproto.subjects import Subjects
from kvproto.tasks import end
from kvservice import tracing
from kvservice.metrics import LiveCollector, Reading
from kvservice.tracing import Tracer

DRAIN_POLL_S = 0.05
READINGS = (  # name, help, and where an `Ingress` has it
    ("running_requests", "Requests admitted and not yet ended.", "admission.running"),
    ("refused_requests_total", "Refused by admission.", "admission.refused_total"),
    ("refused_callers_total", "Refused as nobody known.", "tenancy.refused_total"),
    ("api_keys", "Configured API keys.", "tenancy.key_count"),
    ("counting_ingresses", "Other ingresses that told within 3 s what limited callers use there.", "usage.peers"),
    ("told_usage_reports_total", "Reports sent to them.", "usage_exchange.sent_total"),
    ("heard_usage_reports_total", "Reports of theirs.", "usage_exchange.received_total"),
    (
        "ignored_usage_reports_total",
        "Reports, or accounts in one, that were unreadable, of a life that is over, or too many.",
        "usage_exchange.ignored_total",
    ),
    ("placed_attempts_total", "Attempts placed by placement.", "client.counters.placed_total"),
    (
        "placement_fallbacks_total",
        "Attempts placed by the ring because placement did not answer.",
        "client.counters.fallback_total",
    ),
    (
        "placement_unasked_total",
        "Of them, those of which placement was not even asked, as it had not answered for a while.",
        "client.counters.unasked_total",
    ),
    ("spilled_attempts_total", "Attempts placed in another region.", "client.counters.spilled_total"),
    (
        "region_refusals_total",
        "Other regions that could not take a request, or did not answer.",
        "client.counters.region_refusals_total",
    ),
    ("lost_attempts_total", "Attempts whose worker was lost.", "client.counters.lost_total"),
    ("resends_total", "Times a worker was asked for frames again.", "client.counters.resends_total"),
    ("orphan_frames_total", "Frames for nobody.", "client.inbox.orphan_frames_total"),
    ("malformed_frames_total", "Frames that were unreadable.", "client.inbox.malformed_total"),
    ("splice_hits_total", "Chats whose history was known.", "splices.hits_total"),
    ("splice_misses_total", "Chats whose history was not.", "splices.misses_total"),
    ("splice_bytes", "Memory of known histories.", "splices.bytes_used"),
    ("kept_runs", "Ended and cut requests that may be asked for again.", "runs.kept"),
    ("kept_run_bytes", "Memory of them.", "runs.kept_bytes"),
    ("running_run_bytes", "Memory of running ones.", "runs.memory.used"),
    ("attached_requests_total", "Repeats that joined a running request.", "runs.attached_total"),
    ("resumed_requests_total", "Repeats that went on with a cut request.", "runs.resumed_total"),
    ("replayed_requests_total", "Repeats of finished requests.", "runs.replayed_total"),
    ("sessions", "Sessions of all tenants.", "session_index.table.total"),
    ("running_turns", "Session turns running here.", "sessions.running"),
    ("session_turns_total", "Turns committed to sessions.", "sessions.turns_total"),
    ("background_responses", "Responses in the background that this ingress sees to.", "background.kept"),
    (
        "background_takeovers_total",
        "Of them, those whose ingress was gone.",
        "background.taken_over_total",
    ),
    ("led_batches", "Batches that this ingress leads.", "batches.leaders.led"),
    ("batch_takeovers_total", "Of them, those whose ingress was gone.", "batches.leaders.taken_over_total"),
    ("running_queued_requests", "Requests that may wait and are at work here.", "batches.runner.running"),
    ("done_queued_requests_total", "Results of such requests recorded here.", "batches.runner.done_total"),
    ("expected_returns_total", "Ended turns of which a worker was told when to expect the next.", "pauses.told_total"),
    ("measured_returns_total", "Turns that came with results of tools called here.", "pauses.measured_total"),
    ("ready_workers", "Workers that take new work.", "ready_workers"),
)


def _unix_ms() -> int:
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class IngressBuckets:
    sessions: Bucket
    responses: Bucket
    batches: Bucket

    @classmethod
    async def open(cls, connection: Connection, subjects: Subjects) -> IngressBuckets:
        """Raises Unavailable."""
        buckets = subjects.sessions_bucket, subjects.responses_bucket, subjects.batches_bucket
        return cls(*[await Bucket.open(connection, bucket) for bucket in buckets])


class Ingress:
    """An ingress without its web server. The client must know its members already; `readings` are of other parts."""

    def __init__(
        self,
        client: Client,
        config: IngressConfig,
        buckets: IngressBuckets,
        tenancy: Tenancy,
        registry: CollectorRegistry,
        audit: Audit = NO_AUDIT,
        readings: Iterable[Reading] = (),
        tracer: Tracer = tracing.NULL,
    ) -> None:
        self.client = client
        self._id = config.id
        self._executor = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")
        self._tasks: list[asyncio.Task[Any]] = []
        self.admission = Admission(config.max_concurrent, time.time)
        self.usage = SharedUsage(self.admission.limiter, config.id, new_epoch(), client.now())
        self.usage_exchange = UsageExchange(
            client.connection, client.subjects.ingress_usage(), self.usage, client.now, time.time
        )
        self.audit = audit
        self.tenancy = tenancy
        self.guard = WebGuard(config.web, is_open=tenancy.is_open)
        self.metrics = IngressMetrics(registry, config.targets, lambda: self.models.served())
        self.regions = OtherRegions(client.connection, client.subjects, client.now)
        self.models = Models(client, client.members.view, self._executor, self.regions)
        self.regions.on_change = self.models.on_regions
        self.splices = SpliceIndex(config.splice_bytes)
        self.session_blocks = SessionBlocks(client, self.regions.workers)
        self.sessions = Sessions(
            buckets.sessions,
            config.id,
            config.sessions,
            _unix_ms,
            self._is_alive,
            forget=self.session_blocks.forget,
        )
        self.session_index = SessionIndex(self.sessions)
        self._follower = BucketFollower(
            client.connection, buckets.sessions.name, HEADS, "sessions", self.session_index.read
        )
        self.runs = Runs(config.runs, client.now)
        index = self.session_index
        courses = StreamCourses(_unix_ms)
        self.pauses = ConversationPauses(client)
        parts = IngressParts(
            client, config, tenancy, self.admission, self.models, index, self.metrics, self.runs, courses,
            self.pauses,
        )  # fmt: skip
        prompts = Prompts(self.splices, self._executor, config.tokenize_inline_chars)
        self.flow = RequestFlow(parts, RequestReader(parts, self._executor, audit, tracer), prompts)
        self.texts = TextRoutes(parts, prompts)
        self.moments = WorkerMoments(_unix_ms)
        self.routes = FleetRoutes(parts, self.session_blocks, self.regions, self.moments)
        records = ResponseRecords(buckets.responses)
        jobs = ResponseJobs(self.flow, records, config.id)
        self.background = Background(jobs, records, self._is_alive, config.request_deadline_s)
        self._actives = BucketFollower(
            client.connection, buckets.responses.name, ACTIVE, "responses", self.background.read
        )
        self.responses = ResponseRoutes(jobs, records, self.background, self.session_blocks)
        self.batches = Batches(jobs, buckets.batches, self._is_alive)
        registry.register(LiveCollector((*self._readings(), *readings)))

    def _is_alive(self, ingress: str) -> bool:
        return ingress == self._id or (Role.INGRESS, ingress) in self.client.members.view.members

    @property
    def ready_workers(self) -> int:
        return sum(1 for _ in self.client.members.view.ready())

    async def start(self) -> None:
        await self.regions.start()
        await self.usage_exchange.start()
        self.client.members.listeners += [self.models.on_member, self.moments.on_change]
        self.client.connection.on_reconnect.append(self._follower.begin)
        await self._follower.begin()
        self.client.connection.on_reconnect.append(self._actives.begin)
        await self._actives.begin()
        await self.batches.start()
        self.models.start()
        for name, part in (
            ("session-leases", self.sessions),
            ("session-index", self.session_index),
            ("runs", self.runs),
            ("usage", self.usage_exchange),
            ("responses", self.background),
        ):
            self._tasks.append(asyncio.create_task(part.run(), name=name))

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; False if some is still running after the timeout."""
        self.admission.draining = True
        await asyncio.gather(self.background.hand_over(), self.batches.hand_over())
        end = asyncio.get_running_loop().time() + timeout_s
        while self.admission.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_POLL_S)
        return not self.admission.running

    async def close(self) -> None:
        """The client stays open."""
        with contextlib.suppress(ValueError):
            self.client.members.listeners.remove(self.models.on_member)
            self.client.members.listeners.remove(self.moments.on_change)
        await self._follower.stop()
        await self._actives.stop()
        await self.batches.close()
        await self.background.close()
        await end(self._tasks)
        self._tasks.clear()
        await self.usage_exchange.stop()
        await self.routes.listings.close()
        await self.session_blocks.close()
        await self.regions.stop()
        await self.models.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _readings(self) -> list[Reading]:
        return [
            Reading(f"kvfleet_ingress_{name}", help_, partial(attrgetter(path), self)) for name, help_, path in READINGS
        ]
