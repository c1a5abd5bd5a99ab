"""Loop: what a client asks of other regions: a worker where its own region has none, and who holds a prompt's blocks.

own placement ──▶ "ask eu" ──▶ eu's placement ──▶ a worker there
             ◀── "not eu" ─────┘ refuses, or does not answer
own placement ──▶ w1, "eu may have more" ──▶ eu's placement ──▶ who there has it: w1 may fetch it
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from kvproto.connection import Connection
from kvproto.errors import KvfleetError
from kvproto.generation import ClientCounters
from kvproto.messages import Failed, Placement, PlaceRequest
from kvproto.placement_answers import ask, read_answer
from kvproto.regions import qualify, split
from kvproto.subjects import Subjects
from kvproto.trace_context import headers_of

log = logging.getLogger(__name__)

REGION_TIMEOUT_S = 1.0
SOURCE_TIMEOUT_S = 0.25  # it is only worth a fraction of what it saves


class RegionPlacer:
    """What all requests of a client share. Holds no state of a request."""

    def __init__(self, connection: Connection, subjects: Subjects, counters: ClientCounters) -> None:
        self._connection = connection
        self._subjects = subjects
        self._counters = counters

    async def follow(
        self, question: PlaceRequest, referral: Placement, tenant: str, traceparent: str | None = None
    ) -> Placement | None:
        """A worker of the region that the own placement names, called as from here; None if that one cannot."""
        region = referral.region
        there = replace(question, excluded=_known_there(question.excluded, region), excluded_regions=())
        answer = await self._ask(region, tenant, there, REGION_TIMEOUT_S, traceparent)
        if answer is None or not answer.worker:
            self._counters.region_refusals_total += 1
            return None
        self._counters.spilled_total += 1
        log.info("request %s goes to region %s: %s", question.request, region, referral.why)
        placed = replace(answer, worker=qualify(region, answer.worker), region=region)
        has = max(sum(answer.expected_hit.values()), answer.source_tokens)
        return _with_source(placed, referral) if referral.source and referral.source_tokens > has else placed

    async def find_source(
        self, question: PlaceRequest, placement: Placement, tenant: str, traceparent: str | None = None
    ) -> Placement:
        """The same placement, with a source in the other region that may have more of the prompt, if it has."""
        region = placement.elsewhere
        there = replace(question, excluded=(), excluded_regions=(), policy=None, worker=None, seeks_source=True)
        answer = await self._ask(region, tenant, there, SOURCE_TIMEOUT_S, traceparent)
        has = max(sum(placement.expected_hit.values()), placement.source_tokens)
        if answer is None or not answer.source or answer.source_tokens <= has:
            return placement
        return _with_source(placement, answer)

    async def _ask(
        self, region: str, tenant: str, question: PlaceRequest, timeout_s: float, traceparent: str | None
    ) -> Placement | None:
        try:
            subject = self._subjects.region_place(region, tenant, question.model)
            data = ask(question, timeout_s, time.time())
            headers = headers_of(traceparent, self._connection.max_payload - len(data))
            reply = await self._connection.request(subject, data, timeout_s, headers)
            answer = read_answer(reply.data)
        except (TimeoutError, KvfleetError) as error:
            log.info("request %s: region %s does not answer: %s", question.request, region, error or "in time")
            return None
        if isinstance(answer, Failed):
            log.info("request %s: region %s refuses: %s", question.request, region, answer.message)
            return None
        return answer


def _with_source(placement: Placement, source: Placement) -> Placement:
    return replace(
        placement,
        source=source.source,
        source_tokens=source.source_tokens,
        source_addresses=source.source_addresses,
        source_seal=source.source_seal,
    )


def _known_there(workers: tuple[str, ...], region: str) -> tuple[str, ...]:
    return tuple(own for there, own in map(split, workers) if there == region)
