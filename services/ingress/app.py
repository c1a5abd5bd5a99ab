"""Routes: path -> handler, error -> answer; counts and audits every request. A Starlette router without middleware but
CORS, so that a stream's sends reach the server unwrapped."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvfleet.ingress.dashboard.page import Dashboard
from kvfleet.ingress.fleet.routes import no_such_route, other_method
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.http.web_guard import WebGuard
from kvfleet.ingress.ingress import Ingress
from kvfleet.ingress.telemetry.audit import Audit
from kvfleet.ingress.telemetry.metrics import IngressMetrics
from kvproto.errors import KvfleetError
from kvproto.ids import new_request_id

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
CLIENT_LEFT = 499
FOR_ALL = ("/", "/dashboard/{file}", "/livez", "/readyz", "/ping", "/version", "/openapi.json")  # for any host and site
EXPOSED = ["x-request-id", "request-id", "x-kvfleet-request-id", "x-trace-id", "retry-after", "x-should-retry"]
EXPOSED += [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]


def create_app(ingress: Ingress) -> ASGIApp:
    flow, routes = ingress.flow, ingress.routes
    metrics, audit = ingress.metrics, ingress.audit
    dashboard = Dashboard()
    methods: dict[str, set[str]] = {}

    def route(method: str, path: str, handler: Handler, name: str) -> BaseRoute:
        guard = None if path in FOR_ALL else ingress.guard
        taken = methods.setdefault(path, {"OPTIONS"})
        other = Endpoint(partial(other_method, taken), "other", metrics, audit, None)
        route = _Route(path, Endpoint(handler, name, metrics, audit, guard), method, other)
        taken |= route.methods or set()
        return route

    return _AsSent(
        [
            route("POST", "/v1/chat/completions", flow.chat_completions, "chat_completions"),
            route("POST", "/v1/completions", flow.completions, "completions"),
            route("POST", "/v1/messages", flow.messages, "messages"),
            route("POST", "/v1/messages/count_tokens", ingress.texts.count_tokens, "tokenize"),
            route("POST", "/v1/responses", ingress.responses.create, "responses"),
            route("POST", "/v1/responses/input_tokens", ingress.responses.input_tokens, "tokenize"),
            route("GET", "/v1/responses/{response_id}", ingress.responses.retrieve, "response_get"),
            route("DELETE", "/v1/responses/{response_id}", ingress.responses.delete, "response_delete"),
            route("POST", "/v1/responses/{response_id}/cancel", ingress.responses.cancel, "response_cancel"),
            route("GET", "/v1/responses/{response_id}/input_items", ingress.responses.input_items, "response_get"),
            route("POST", "/v1/files", ingress.batches.files.create, "files"),
            route("GET", "/v1/files", ingress.batches.files.list, "files"),
            route("GET", "/v1/files/{file_id}", ingress.batches.files.retrieve, "files"),
            route("DELETE", "/v1/files/{file_id}", ingress.batches.files.delete, "files"),
            route("GET", "/v1/files/{file_id}/content", ingress.batches.files.content, "files"),
            route("POST", "/v1/batches", ingress.batches.routes.create, "batches"),
            route("GET", "/v1/batches", ingress.batches.routes.list, "batches"),
            route("GET", "/v1/batches/{batch_id}", ingress.batches.routes.retrieve, "batches"),
            route("POST", "/v1/batches/{batch_id}/cancel", ingress.batches.routes.cancel, "batches"),
            route("POST", "/generate", flow.generate, "generate"),
            route("POST", "/tokenize", ingress.texts.tokenize, "tokenize"),
            route("POST", "/detokenize", ingress.texts.detokenize, "detokenize"),
            route("GET", "/version", routes.version, "version"),
            route("GET", "/ping", routes.readyz, "health"),
            route("GET", "/v1/models", routes.models, "models"),
            route("GET", "/v1/models/{model:path}", routes.model, "models"),
            route("GET", "/stats", routes.stats, "stats"),
            route("GET", "/workers", routes.workers, "workers"),
            route("POST", "/workers/{worker_id}/drain", routes.drain, "worker_drain"),
            route("GET", "/kv/route/{seq_id}", routes.kv_route, "kv_route"),
            route("GET", "/sessions/{seq_id}/kv", routes.session_kv, "session_kv"),
            route("GET", "/sessions/{seq_id}", routes.session, "session_get"),
            route("DELETE", "/sessions/{seq_id}", routes.delete_session, "session_delete"),
            route("GET", "/v1/placements", routes.newest_placements, "newest_placements"),
            route("GET", "/v1/pauses", routes.pauses, "newest_placements"),
            route("GET", "/v1/timeline", routes.timeline, "timeline"),
            route("GET", "/v1/placements/{id:path}", routes.placements, "placements"),
            route("GET", "/livez", routes.livez, "health"),
            route("GET", "/readyz", routes.readyz, "health"),
            route("GET", "/health", routes.health, "health"),
            route("GET", "/metrics", routes.metrics, "metrics"),
            route("GET", "/openapi.json", routes.openapi, "openapi"),
            route("GET", "/", dashboard.index, "dashboard"),
            route("GET", "/dashboard/{file}", dashboard.file, "dashboard"),
        ],
        redirect_slashes=False,
        default=Endpoint(no_such_route, "other", metrics, audit, None),
    )


def for_browsers(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allows pages of these origins to ask and read."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED,
    )


class _AsSent(Router):
    """Matches paths as they were sent, percent-encoded: a session's name with a slash is one segment."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__({**scope, "path": scope["raw_path"].decode("latin-1")}, receive, send)


@dataclass(eq=False, slots=True)
class Endpoint:
    """One handler as an ASGI application: the top of its task, which answers errors."""

    handler: Handler
    route: str
    metrics: IngressMetrics
    audit: Audit
    guard: WebGuard | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, new_request_id())
        failure: KvfleetError | None = None
        try:
            if self.guard is not None:
                self.guard.check(exchange)
            await self.handler(exchange)
        except KvfleetError as error:
            failure = error
            exchange.outcome = error.code
            if exchange.started:
                self.metrics.tally.stream_errors_total += 1
            if not exchange.gone:
                await exchange.refuse(error)
        except Exception:  # the task's top: an internal fault is one 500, or one cut stream
            exchange.outcome = KvfleetError.code
            about = {"request": exchange.request_id, "callers_id": exchange.callers_id}
            log.exception("request %s on %s failed", exchange.request_id, self.route, extra=about)
            if exchange.started:
                raise  # the server cuts the connection: the client must not take what it has for the whole
            failure = KvfleetError("internal error")
            await exchange.refuse(failure)
        finally:
            code = CLIENT_LEFT if exchange.gone else exchange.status
            self.metrics.requests.labels(self.route, str(code)).inc()
            if exchange.trace is not None:
                exchange.trace.end(exchange.request_id, code)
            self.audit.ended(exchange, self.route, code, failure)
            if exchange.outcome:
                self.metrics.ended(self.route, exchange.outcome)


class _Route(Route):
    """Answers OPTIONS, and refuses other methods in the form of every other error."""

    def __init__(self, path: str, endpoint: Endpoint, method: str, other_method: ASGIApp) -> None:
        super().__init__(path, endpoint, methods=[method], name=path)
        self._other_method = other_method

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = self.methods is None or scope["method"] in self.methods
        await (self.app if allowed else self._other_method)(scope, receive, send)
