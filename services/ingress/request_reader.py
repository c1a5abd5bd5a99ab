"""Loop: the generating request of an exchange: its caller, its name, and what its body asks for.

    authenticate ─▶ name (headers) ─▶ a place while the body is read ─▶ Call

Headers come first: nothing is read of a caller that would be refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.limits.callers import Caller, priority_of, require_policy
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.requests.bodies import ChatAsk, CompletionAsk, GenerateAsk
from kvfleet.ingress.requests.responses import ResponseAsk
from kvfleet.ingress.runs.event_ids import LAST_EVENT_ID, START
from kvfleet.ingress.runs.repeats import RequestName, digest_of, key_secret, name_request
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.telemetry import request_trace
from kvfleet.ingress.telemetry.audit import Audit
from kvfleet.ingress.telemetry.request_trace import RequestTrace
from kvproto.errors import InvalidRequest
from kvproto.ids import new_request_id
from kvservice.fields import Body, parse_body
from kvservice.tracing import Tracer

log = logging.getLogger(__name__)

# The event loop reads these in about 1.5 ms. Longer bodies (4 MB of token ids take a tenth of a second) are read in the
# executor, so that the tokens of other requests go on meanwhile.
INLINE_BYTES = 64 * 1024

Ask = TypeVar("Ask", ChatAsk, CompletionAsk, GenerateAsk, ResponseAsk)
Other = TypeVar("Other", ChatAsk, CompletionAsk, GenerateAsk, ResponseAsk)


@dataclass(frozen=True, slots=True)
class Call(Generic[Ask]):
    """One HTTP request. `digest` is what its repeats have in common."""

    route: str
    ask: Ask
    caller: Caller
    priority: int
    name: RequestName
    digest: bytes
    trace: RequestTrace | None
    traceparent: str | None
    arrived_at: float

    def of(self, ask: Other) -> Call[Other]:
        """The same request, read as another ask."""
        return replace(self, ask=ask)  # type: ignore[return-value, arg-type]


@dataclass(eq=False, slots=True)
class RequestReader:
    """Holds no state of a request between its awaits. `executor` is shared with other CPU work of the process."""

    parts: IngressParts
    executor: Executor
    audit: Audit
    tracer: Tracer
    _secret: bytes = field(init=False)
    _sealed: bool = field(init=False)

    def __post_init__(self) -> None:
        fleet_key, has_one_tenant = self.parts.config.fleet_key, self.parts.tenancy.has_one_tenant
        self._secret, everywhere = key_secret(fleet_key, one_tenant=has_one_tenant)
        self._sealed = bool(fleet_key) and not has_one_tenant
        if not everywhere:
            log.warning("no fleet key: an Idempotency-Key is known to this ingress only")

    async def read(self, exchange: Exchange, route: str, read: Callable[[Body], Ask]) -> Call[Ask]:
        """Its place is free when this returns: the caller must admit it in the same step of the event loop. Raises what
        `Exchange.read_body` and `read` do."""
        arrived_at, trace = now(), request_trace.begin(self.tracer, exchange, route)
        caller, admission = await self.parts.identify(exchange), self.parts.admission
        name = name_request(
            caller.tenant,
            exchange.header(b"last-event-id"),
            exchange.header(b"idempotency-key"),
            self._secret,
            sealed=self._sealed,
        )
        repeat, returns = repeat_state(self.parts.runs.known(caller.tenant, name))
        if not repeat:
            self.parts.runs.memory.check_room()
        with admission.reading(caller, now(), repeat=repeat, returns=returns):
            ask, digest = await self._read_body(exchange, route, read)
        if self.parts.runs.is_foreign(caller.tenant, name.request):
            if name.at != START:  # under another id it would be another stream: none is begun in the middle
                raise InvalidRequest("is of no request that is known here", field=LAST_EVENT_ID)
            name = replace(name, request=new_request_id())
        exchange.request_id = name.request
        require_policy(caller, ask.placement.policy)
        priority = priority_of(caller, ask.placement.priority)
        if self.audit.is_on:
            self.audit.request_started(exchange, route, self.parts.models.known(ask.model))
        if trace is not None:
            trace.names_session = route == "generate" or getattr(ask, "seq_id", None) is not None
        given = None if self.tracer.enabled else exchange.header(b"traceparent")  # others may trace
        return Call(route, ask, caller, priority, name, digest, trace, given, arrived_at)

    def another(self, call: Call[Ask]) -> Call[Ask]:
        """The same under a name of its own."""
        tenant = call.caller.tenant
        return replace(call, name=name_request(tenant, None, None, self._secret, sealed=self._sealed))

    def name_of_key(self, tenant: str, key: str) -> RequestName:
        """Of a key that only its tenant knows: the same at every ingress."""
        return name_request(tenant, None, key, self._secret if self._sealed else b"", sealed=self._sealed)

    async def _read_body(self, exchange: Exchange, route: str, read: Callable[[Body], Ask]) -> tuple[Ask, bytes]:
        data = await exchange.read_body(self.parts.config.max_body_bytes, self.parts.config.body_timeout_s)
        if len(data) <= INLINE_BYTES:
            return _read_and_digest(data, route, read)
        return await asyncio.get_running_loop().run_in_executor(self.executor, _read_and_digest, data, route, read)


def _read_and_digest(data: bytes, route: str, read: Callable[[Body], Ask]) -> tuple[Ask, bytes]:
    body = parse_body(data)
    return read(body), digest_of(route, body)


def repeat_state(found: Run | None) -> tuple[bool, int]:
    """Whether a request repeats one that runs or has finished, and how often a cut one has come back."""
    if found is None:
        return False, 0
    repeat = found.error is None and (found.finished or found.payer is not None)
    return repeat, max(1, found.starts)


def now() -> float:
    return asyncio.get_running_loop().time()
