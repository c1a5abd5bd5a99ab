"""The routes that generate nothing: models, workers, sums, placements, sessions and their blocks, health. Sessions of
other tenants do not exist here, not even for admins: session keys carry the caller's own tenant."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvfleet import __version__
from kvfleet.ingress.fleet import report
from kvfleet.ingress.fleet.listings import Listing, Listings, ListQuestion
from kvfleet.ingress.fleet.openapi import OPERATIONS, openapi_document
from kvfleet.ingress.fleet.report import newest_report, pauses_report, placements_report, read_request_id
from kvfleet.ingress.fleet.timeline import WorkerMoments, timeline_report
from kvfleet.ingress.http.answer_types import told
from kvfleet.ingress.http.exchange import Exchange, integer_query
from kvfleet.ingress.limits.callers import Caller, require_admin
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.prompts.models import OtherRegions
from kvfleet.ingress.sessions.session import Session
from kvfleet.ingress.sessions.session_blocks import SessionBlocks, tokens_by_tier
from kvproto.errors import (
    AuthenticationFailed,
    KvfleetError,
    ModelNotFound,
    NotFound,
    NoWorkers,
    PermissionDenied,
    Unavailable,
    WorkerLost,
)
from kvproto.hash_ring import ring_key
from kvproto.messages import AdminCommand, AdminRequest, Decision, Role
from kvproto.regions import split

SAFETENSORS = b"application/octet-stream"
DEFAULT_NEWEST = 50
DRAIN_TIMEOUT_S = 3.0
_PATHS = frozenset(one.path for one in OPERATIONS)


@dataclass(eq=False, slots=True)
class FleetRoutes:
    """Owned by the event loop."""

    parts: IngressParts
    blocks: SessionBlocks
    regions: OtherRegions
    moments: WorkerMoments
    unready: bool = False  # set before a drain: load balancers look elsewhere, requests are still served
    listings: Listings = field(init=False)

    def __post_init__(self) -> None:
        self.listings = Listings(self._listed)

    async def models(self, exchange: Exchange) -> None:
        await self.parts.tenancy.identify(exchange)
        await _json(exchange, report.models_report(self.parts.models.served()))

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}. Without a name, after a slash, all of them."""
        name = exchange.path_params["model"]
        if not name:
            await self.models(exchange)
            return
        await self.parts.tenancy.identify(exchange)
        if (record := self.parts.models.served().get(name)) is None:
            raise ModelNotFound(f"no worker serves {name[:80]!r}", field="model")
        await _json(exchange, report.models_report({name: record}).data[0])

    async def workers(self, exchange: Exchange) -> None:
        caller = await self._admin(exchange)
        client = self.parts.client
        address_of = partial(client.subjects.worker_generate, tenant=caller.tenant)
        await _json(exchange, report.workers_report(client.members.view, address_of))

    async def stats(self, exchange: Exchange) -> None:
        await self._admin(exchange)
        counters = self.parts.client.counters
        own = told(
            report.IngressCounts,
            self.parts.metrics.tally,
            id=self.parts.config.id,
            sessions=self.parts.index.table.total,
            placed_total=counters.placed_total,
            placement_fallbacks_total=counters.fallback_total,
            lost_attempts_total=counters.lost_total,
        )
        await _json(exchange, report.stats_report(self.parts.client.members.view, own))

    async def placements(self, exchange: Exchange) -> None:
        """GET /v1/placements/{id}. Those of other tenants are not found, so that no tenant learns which ids exist; an
        admin key finds all."""
        caller = await self.parts.tenancy.identify(exchange)
        request = read_request_id(exchange.path_params["id"])
        try:
            decisions = await self.parts.client.explain(request, None if caller.admin else caller.tenant)
        except NotFound:
            why = f"no decision about {request!r} is known: it may be too old, or placed while placement was away"
            raise NotFound(why, field="id") from None  # the same text for another tenant's id
        await _json(exchange, placements_report(request, decisions))

    async def newest_placements(self, exchange: Exchange) -> None:
        """GET /v1/placements?limit=N&model=M: all tenants' for an admin key."""
        await self._list(exchange, Listing.PLACEMENTS)

    async def pauses(self, exchange: Exchange) -> None:
        """GET /v1/pauses?limit=N: of the caller's own tenant, whatever the key."""
        caller = await self.parts.tenancy.identify(exchange)
        limit = integer_query(exchange, "limit", DEFAULT_NEWEST)
        question = ListQuestion(caller.tenant, None, limit, Listing.PAUSES)
        await exchange.respond(200, await self.listings.ask(question))

    async def timeline(self, exchange: Exchange) -> None:
        """GET /v1/timeline?limit=N&model=M: the course of the last streams, and what became of workers: of all for an
        admin key, else of those that these streams were at."""
        await self._list(exchange, Listing.TIMELINE)

    async def drain(self, exchange: Exchange) -> None:
        """POST /workers/{worker_id}/drain, for admins: as `kvfleet drain`. It answers once the worker drains."""
        await self._admin(exchange)
        worker = exchange.path_params["worker_id"]
        if not self.parts.client.members.view.is_alive(worker):  # so no other subject is ever published to
            raise NotFound(f"no worker {worker[:64]!r} is there", field="worker_id")
        try:
            await self.parts.client.admin(worker, AdminRequest(AdminCommand.DRAIN), DRAIN_TIMEOUT_S)
        except WorkerLost:
            raise NotFound(f"worker {worker} is not there any more", field="worker_id") from None
        except TimeoutError:
            raise Unavailable(f"worker {worker} does not answer", retry_after_s=1.0) from None
        await _json(exchange, report.DrainingAnswer(worker, True))

    async def kv_route(self, exchange: Exchange) -> None:
        """GET /kv/route/{seq_id}?model=M: the session's last worker while it lives, else the ring's choice."""
        caller = await self.parts.metered(exchange)
        session = await self.parts.index.sessions.read(caller.tenant, exchange.path_params["seq_id"])
        await _json(exchange, self._located(caller, self._worker_of(caller, session, exchange.query_value("model"))))

    async def session(self, exchange: Exchange) -> None:
        """GET /sessions/{seq_id}: also which of its blocks each worker of this region holds. `worker_id` is null when
        its worker does not answer."""
        caller = await self.parts.metered(exchange)
        session = await self.parts.index.sessions.find(caller.tenant, exchange.path_params["seq_id"])
        head = session.head
        assert head is not None
        found = await self.blocks.find(caller.tenant, head.model, session.ids)
        region, held, place = None, None, None
        with contextlib.suppress(NoWorkers):
            worker = self._worker_of(caller, session)
            region, held, place = split(worker)[0] or None, found.get(worker), self._located(caller, worker)
        answer = told(
            report.SessionAnswer,
            head,
            busy=self.parts.index.sessions.is_busy(session),
            tokens=len(session.ids),
            cached_tokens=held.cached_tokens if held else 0,
            blocks=held.blocks if held else (),
            worker_id=place.worker_id if held and place else None,
            address=place.address if held and place else None,
            region=region,
            workers=tokens_by_tier(found.items()),
        )
        await _json(exchange, answer)

    async def session_kv(self, exchange: Exchange) -> None:
        """GET /sessions/{seq_id}/kv?layer=N: K and V of one layer, `[tokens, kv_heads, head_dim]`, as safetensors."""
        caller = await self.parts.metered(exchange)
        require_admin(caller)
        session = await self.parts.index.sessions.find(caller.tenant, exchange.path_params["seq_id"])
        layer = integer_query(exchange, "layer", 0)
        assert session.head is not None
        question = AdminRequest(AdminCommand.READ_KV, caller.tenant, session.ids, layer=layer, model=session.head.model)
        worker = self._worker_of(caller, session)
        if split(worker)[0]:
            raise NotFound(f"the last turn ran at {worker}, K and V are read in this region only", field="seq_id")
        try:
            data = await self.parts.client.admin(worker, question)
        except TimeoutError:
            raise Unavailable(f"worker {worker} does not answer", retry_after_s=1.0) from None
        await exchange.respond(200, data, content_type=SAFETENSORS)

    async def delete_session(self, exchange: Exchange) -> None:
        """DELETE /sessions/{seq_id}: its history, and blocks that no other request shares. 409 while a turn runs."""
        caller = await self.parts.metered(exchange)
        seq_id = exchange.path_params["seq_id"]
        await self.parts.index.sessions.erase(caller.tenant, seq_id, self.blocks.erase)
        await _json(exchange, report.DeletedAnswer(seq_id, True))

    async def version(self, exchange: Exchange) -> None:
        await _json(exchange, report.VersionAnswer(__version__))

    async def livez(self, exchange: Exchange) -> None:
        await _json(exchange, report.StatusAnswer("ok"))

    async def readyz(self, exchange: Exchange) -> None:
        missing = self.missing()
        await _json(exchange, report.StatusAnswer(missing or "ok"), status=503 if missing else 200)

    async def health(self, exchange: Exchange) -> None:
        """As /readyz, with counts; with names for callers with a key. `models_unavailable` are those of `models` that
        no worker serves just now."""
        missing = self.missing()
        view = self.parts.client.members.view
        answer = report.HealthAnswer(
            status=missing or "ok",
            nats=self.parts.client.connection.is_connected,
            workers_ready=sum(1 for _ in view.ready()),
            placements=report.members_of(view, Role.PLACEMENT),
            vaults=report.members_of(view, Role.VAULT),
        )
        names_caller = any(exchange.header(name) is not None for name in (b"authorization", b"x-api-key"))
        if self.parts.tenancy.is_open or names_caller:  # probes without a key do not count as refused
            with contextlib.suppress(AuthenticationFailed, PermissionDenied, Unavailable):
                await self.parts.tenancy.identify(exchange)
                served = self.parts.models.served()
                models = self.parts.models.remembered()
                unavailable = [model for model in models if model not in served]
                more = {"ingress": self.parts.config.id, "models": models, "models_unavailable": unavailable}
                answer = told(report.KnownHealthAnswer, answer, **more)
        await _json(exchange, answer, status=503 if missing else 200)

    async def metrics(self, exchange: Exchange) -> None:
        """For admins; the metrics port shows the same to all."""
        await self._admin(exchange)
        body = generate_latest(self.parts.metrics.registry)
        await exchange.respond(200, body, content_type=CONTENT_TYPE_LATEST.encode())

    async def openapi(self, exchange: Exchange) -> None:
        await exchange.respond(200, await asyncio.to_thread(_openapi))

    def missing(self) -> str:
        """Why no request would be served; empty if one would."""
        if self.unready or self.parts.admission.draining:
            return "draining"
        if not self.parts.client.connection.is_connected:
            return "no connection to NATS"
        if not self.parts.models.is_ready():
            return "no ready worker whose model is loaded"
        return ""

    async def _listed(self, question: ListQuestion) -> bytes:
        tenant, model, limit, listing = question
        if listing is Listing.PLACEMENTS:
            return orjson.dumps(newest_report(await self.parts.client.newest_decisions(limit, tenant, model)))
        decisions: tuple[Decision, ...] = ()
        with contextlib.suppress(Unavailable):  # without placement an ingress knows its own streams
            decisions = await self.parts.client.newest_decisions(limit, tenant, model)
        if listing is Listing.PAUSES:
            return orjson.dumps(pauses_report(self.parts.pauses.times.known(tenant or ""), decisions))
        own, moments = self.parts.courses.of(tenant, model), self.moments
        now, every_worker = moments.unix_ms(), tenant is None
        return orjson.dumps(timeline_report(now, own, decisions, moments.moments, limit, every_worker=every_worker))

    async def _list(self, exchange: Exchange, listing: Listing) -> None:
        caller = await self.parts.tenancy.identify(exchange)
        limit = integer_query(exchange, "limit", DEFAULT_NEWEST)
        tenant = None if caller.admin else caller.tenant
        question = ListQuestion(tenant, exchange.query_value("model"), limit, listing)
        await exchange.respond(200, await self.listings.ask(question))

    async def _admin(self, exchange: Exchange) -> Caller:
        caller = await self.parts.tenancy.identify(exchange)
        require_admin(caller)
        return caller

    def _worker_of(self, caller: Caller, session: Session, said_model: str | None = None) -> str:
        members = self.parts.client.members
        head = session.head
        if head is not None and head.worker:
            region = split(head.worker)[0]
            living = head.worker in self.regions.workers(region, head.model) if region else False
            if living or members.view.is_alive(head.worker):
                return head.worker
        model = head.model if head else said_model or self.parts.models.default_name()
        worker = members.ring(model).owner(ring_key(caller.tenant, session=session.key))
        if worker is None:
            raise NoWorkers(f"no worker of {model!r} is ready", retry_after_s=2.0)
        return worker

    def _located(self, caller: Caller, worker: str) -> report.LocatedAnswer:
        region = split(worker)[0] or None
        address = None if region else self.parts.client.subjects.worker_generate(worker, caller.tenant)
        return report.LocatedAnswer(worker, address, region)


@cache
def _openapi() -> bytes:
    """Takes a tenth of a second, once; must not run in the event loop."""
    return orjson.dumps(openapi_document())


async def no_such_route(exchange: Exchange) -> None:
    hint = ""
    if f"/v1{exchange.path}" in _PATHS:
        hint = f", but there is /v1{exchange.path}: the base URL of OpenAI's clients ends with /v1"
    elif exchange.path.startswith("/v1/v1/"):
        hint = ": the base URL has /v1 twice"
    await exchange.refuse(_RouteError(404, "no_such_route", f"there is no route {_asked(exchange)}{hint}"))


async def other_method(taken: Iterable[str], exchange: Exchange) -> None:
    """Answers OPTIONS, by which a browser asks before another site's page may: without --cors-origins none may."""
    allow = (b"allow", ", ".join(sorted(taken)).encode())
    if exchange.method == "OPTIONS":
        await exchange.respond_empty([allow])
        return
    exchange.more_headers = lambda: [allow]
    await exchange.refuse(_RouteError(405, "method_not_allowed", f"the route does not take {_asked(exchange)}"))


def _asked(exchange: Exchange) -> str:
    return f"{exchange.method[:20]} {exchange.path[:200]}"


class _RouteError(KvfleetError):
    """Refused by HTTP itself; never crosses the wire."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = code


async def _json(exchange: Exchange, answer: object, status: int = 200) -> None:
    await exchange.respond(status, orjson.dumps(answer))
