"""The routes that generate nothing: models, workers, sums, placements, sessions and where their blocks are, health.

Sessions of other tenants do not exist here, for admins neither: their keys carry the caller's own tenant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvproto.affinity import ring_key
from kvproto.client import Client
from kvproto.errors import KvfleetError, ModelNotFound, NotFound, NoWorkers, Unavailable
from kvproto.messages import AdminCommand, AdminRequest, Role, SessionHead
from services.ingress.config import IngressConfig
from services.ingress.fleet_report import members_of, models_report, stats_report, workers_report
from services.ingress.http_exchange import Exchange, integer_query
from services.ingress.metrics import IngressMetrics
from services.ingress.models import Models
from services.ingress.openapi import openapi_document
from services.ingress.placement_report import placements_report, read_request_id
from services.ingress.session_blocks import SessionBlocks, tokens_by_tier
from services.ingress.session_index import SessionIndex
from services.ingress.sessions import Session, Sessions
from services.ingress.tenancy import ApiKey, Tenancy, require_admin

SAFETENSORS = b"application/octet-stream"


class FleetRoutes:
    """Owned by the event loop; reads what other parts know."""

    def __init__(
        self,
        client: Client,
        config: IngressConfig,
        *,
        tenancy: Tenancy,
        models: Models,
        sessions: Sessions,
        session_index: SessionIndex,
        metrics: IngressMetrics,
        is_draining: Callable[[], bool],
    ) -> None:
        self._client = client
        self._blocks = SessionBlocks(client)
        self._config = config
        self._tenancy = tenancy
        self._models = models
        self._sessions = sessions
        self._session_index = session_index
        self._metrics = metrics
        self._is_draining = is_draining

    # ------------------------------------------------------------------ fleet

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        self._authenticate(exchange)
        await _json(exchange, models_report(self._models.served()))

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}."""
        self._authenticate(exchange)
        name = exchange.path_value("model")
        found = [record for record in self._models.served() if record.model == name]
        if not found:
            raise ModelNotFound(f"no worker serves {name[:80]!r}", field="model")
        await _json(exchange, models_report(found)["data"][0])

    async def workers(self, exchange: Exchange) -> None:
        """GET /workers."""
        self._authenticate(exchange)
        await _json(exchange, workers_report(self._client.members.view))

    async def stats(self, exchange: Exchange) -> None:
        """GET /stats: the fleet's sums, and this ingress's own counts."""
        self._authenticate(exchange)
        tally, counters = self._metrics.tally, self._client.counters
        own = {
            "id": self._config.id,
            "active_streams": tally.active_streams,
            "generated_tokens_total": tally.generated_tokens,
            "prompt_tokens_total": tally.prompt_tokens,
            "cached_tokens_total": tally.cached_tokens,
            "spliced_tokens_total": tally.spliced_tokens,
            "sessions": self._session_index.table.total,
            "placed_total": counters.placed_total,
            "placement_fallbacks_total": counters.fallback_total,
            "lost_attempts_total": counters.lost_total,
        }
        await _json(exchange, {**stats_report(self._client.members.view), "ingress": own})

    async def placements(self, exchange: Exchange) -> None:
        """GET /v1/placements/{id}: why a request was placed as it was, and what became of it.

        Those of other tenants are not found, so that nobody learns which ids exist; an admin key finds all.
        """
        caller = self._authenticate(exchange)
        request = read_request_id(exchange.path_value("id"))
        try:
            decisions = await self._client.explain(request, None if caller.admin else caller.tenant)
        except NotFound:
            # The text is the same for what is nobody's and what is somebody else's.
            raise NotFound(
                f"no decision about {request!r} is known: it may be too old, or placed while placement was away",
                field="id",
            ) from None
        await _json(exchange, placements_report(request, decisions))

    # ------------------------------------------------------------------ sessions

    async def kv_route(self, exchange: Exchange) -> None:
        """GET /kv/route/{seq_id}?model=M: the session's last worker while it lives, else the ring's choice."""
        caller = self._authenticate(exchange)
        session = await self._sessions.read(caller.tenant, exchange.path_value("seq_id"))
        await _json(exchange, self._located(self._worker_of(caller, session, exchange.query_value("model"))))

    async def session(self, exchange: Exchange) -> None:
        """GET /sessions/{seq_id}: its tokens, how many of them and which blocks its worker holds, and how many leading
        ones each worker has by tier.

        The history is there whoever lives; `worker_id` is null when its worker does not say what is cached.
        """
        caller = self._authenticate(exchange)
        session = await self._sessions.find(caller.tenant, exchange.path_value("seq_id"))
        head = session.head
        assert head is not None
        place: dict[str, Any] = {"cached_tokens": 0, "blocks": [], "worker_id": None, "address": None}
        found = await self._blocks.find(caller.tenant, head.model, session.ids)
        with contextlib.suppress(NoWorkers):
            worker = self._worker_of(caller, session)
            if (held := found.get(worker)) is not None:
                place = {"cached_tokens": held.cached_tokens, "blocks": list(held.blocks), **self._located(worker)}
        await _json(
            exchange,
            {
                **_described(head),
                "busy": self._sessions.is_busy(session),
                "tokens": len(session.ids),
                **place,
                "workers": tokens_by_tier(found.items()),
            },
        )

    async def session_kv(self, exchange: Exchange) -> None:
        """GET /sessions/{seq_id}/kv?layer=N: K and V of one layer, `[tokens, kv_heads, head_dim]`, as safetensors."""
        caller = self._authenticate(exchange)
        require_admin(caller)
        session = await self._sessions.find(caller.tenant, exchange.path_value("seq_id"))
        question = AdminRequest(
            AdminCommand.READ_KV, caller.tenant, session.ids, layer=integer_query(exchange, "layer", 0)
        )
        data = await self._ask(self._worker_of(caller, session), question)
        await exchange.respond(200, data, content_type=SAFETENSORS)

    async def delete_session(self, exchange: Exchange) -> None:
        """DELETE /sessions/{seq_id}: its history, and of its blocks those that nobody shares. 409 while a turn runs."""
        caller = self._authenticate(exchange)
        seq_id = exchange.path_value("seq_id")
        session = await self._sessions.erase(caller.tenant, seq_id)
        assert session.head is not None
        await self._blocks.erase(caller.tenant, session.head.model, session.ids)
        await _json(exchange, {"seq_id": seq_id, "deleted": True})

    # ------------------------------------------------------------------ process

    async def livez(self, exchange: Exchange) -> None:
        """The event loop runs."""
        await _json(exchange, {"status": "ok"})

    async def readyz(self, exchange: Exchange) -> None:
        """A request would be served: NATS answers, a ready worker's model is loaded, and nothing drains."""
        missing = self._missing()
        await _json(exchange, {"status": missing or "ok"}, status=503 if missing else 200)

    async def health(self, exchange: Exchange) -> None:
        """As /readyz, with what is there."""
        missing = self._missing()
        report = {
            "status": missing or "ok",
            "ingress": self._config.id,
            "nats": self._client.connection.is_connected,
            "workers_ready": sum(1 for _ in self._client.members.view.ready()),
            "placements": members_of(self._client.members.view, Role.PLACEMENT),
            "vaults": members_of(self._client.members.view, Role.VAULT),
            "models": [record.model for record in self._models.served()],
        }
        await _json(exchange, report, status=503 if missing else 200)

    async def metrics(self, exchange: Exchange) -> None:
        body = generate_latest(self._metrics.registry)
        await exchange.respond(200, body, content_type=CONTENT_TYPE_LATEST.encode())

    async def openapi(self, exchange: Exchange) -> None:
        """GET /openapi.json."""
        await exchange.respond(200, _openapi())

    def _missing(self) -> str:
        if self._is_draining():
            return "draining"
        if not self._client.connection.is_connected:
            return "no connection to NATS"
        if not self._models.is_ready():
            return "no ready worker whose model is loaded"
        return ""

    # ------------------------------------------------------------------ steps

    def _authenticate(self, exchange: Exchange) -> ApiKey:
        return self._tenancy.authenticate(exchange.header(b"authorization"), exchange.header(b"x-api-key"))

    def _worker_of(self, caller: ApiKey, session: Session, said_model: str | None = None) -> str:
        members = self._client.members
        head = session.head
        if head is not None and head.worker and members.view.is_alive(head.worker):
            return head.worker
        model = head.model if head else said_model or self._models.default_name(self._config.default_model)
        worker = members.ring(model).owner(ring_key(caller.tenant, session=session.key))
        if worker is None:
            raise NoWorkers(f"no worker of {model!r} is ready", retry_after_s=2.0)
        return worker

    def _located(self, worker: str) -> dict[str, Any]:
        return {"worker_id": worker, "address": self._client.members.view.workers[worker].record.address}

    async def _ask(self, worker: str, question: AdminRequest) -> bytes:
        try:
            return await self._client.admin(worker, question)
        except TimeoutError:
            raise Unavailable(f"worker {worker} does not answer", retry_after_s=1.0) from None


@cache
def _openapi() -> bytes:
    return orjson.dumps(openapi_document())


async def no_such_route(exchange: Exchange) -> None:
    await exchange.refuse(_RouteError(404, "no_such_route", "there is no such route"))


async def no_such_method(exchange: Exchange) -> None:
    await exchange.refuse(_RouteError(405, "method_not_allowed", "this route does not take that method"))


class _RouteError(KvfleetError):
    """What HTTP itself refuses; it never crosses the wire."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = code


def _described(head: SessionHead) -> dict[str, Any]:
    return {
        "seq_id": head.seq_id,
        "model": head.model,
        "turns": head.turns,
        "created_unix_ms": head.created_unix_ms,
        "updated_unix_ms": head.updated_unix_ms,
    }


async def _json(exchange: Exchange, value: dict[str, Any], status: int = 200) -> None:
    await exchange.respond(status, orjson.dumps(value))
