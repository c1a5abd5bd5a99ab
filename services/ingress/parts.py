"""The parts that all routes of one ingress share. `Ingress` builds them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.http.limit_headers import limit_headers
from kvfleet.ingress.limits.admission import Admission
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.prompts.models import Models
from kvfleet.ingress.runs.runs import Runs
from kvfleet.ingress.sessions.pauses import ConversationPauses
from kvfleet.ingress.sessions.session_index import SessionIndex
from kvfleet.ingress.settings import IngressConfig
from kvfleet.ingress.telemetry.metrics import IngressMetrics
from kvfleet.ingress.telemetry.stream_courses import StreamCourses
from kvproto.client import Client


@dataclass(frozen=True, slots=True)
class IngressParts:
    """Each part is owned by the event loop."""

    client: Client
    config: IngressConfig
    tenancy: Tenancy
    admission: Admission
    models: Models
    index: SessionIndex  # with the sessions
    metrics: IngressMetrics
    runs: Runs
    courses: StreamCourses
    pauses: ConversationPauses

    async def identify(self, exchange: Exchange) -> Caller:
        """The caller, whose limits the answer's headers tell. Raises what `Tenancy.identify` does."""
        caller = await self.tenancy.identify(exchange)
        now, admission = asyncio.get_running_loop().time, self.admission
        exchange.more_headers = lambda: limit_headers(admission.limiter, caller, now(), admission.unix_s())
        return caller

    async def metered(self, exchange: Exchange) -> Caller:
        """The caller of a route that may ask workers, or tokenises: it counts as a request."""
        caller = await self.identify(exchange)
        self.admission.meter(caller, asyncio.get_running_loop().time())
        return caller
