"""How long faults were felt: the longest pause of a stream that ran when one happened, by its client's clock. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.history import Exchange, Happened, History
from tests.chaos.layout import Layout, Role
from tests.chaos.schedule import Kind

FELT_S = 0.5  # so long after it began a fault may still begin to be felt, though it is over


@dataclass(frozen=True, slots=True)
class Felt:
    """One fault: how many streams it hit, and the longest pause of any of them; None where it hit none."""

    fault: Happened
    streams: int
    gap_s: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """All faults of one kind against one role."""

    kind: Kind
    role: str
    count: int
    streams: int
    median_s: float | None
    worst_s: float | None
    back_s: float | None = None  # median, from the fault's end until all that it had to do with is ready again


def felt(happened: Happened, history: History, layout: Layout) -> Felt:
    over = happened.over_at if happened.over_at is not None else happened.began
    until = max(over, happened.began + FELT_S)
    gaps = [
        max((b - a for a, b in pairwise(_times(one)) if b > happened.began and a < until), default=0.0)
        for one in history.exchanges
        if _runs_within(one, happened.began, over) and _concerns(happened, one, layout)
    ]
    return Felt(happened, len(gaps), max(gaps) if gaps else None)


def rows(history: History, layout: Layout) -> list[Row]:
    """By kind and role, in the order of the kinds."""
    found: dict[tuple[Kind, str], list[Felt]] = {}
    for happened in history.faults:
        role = "nats" if happened.fault.target == "nats" else layout.place(happened.fault.target).role.value
        found.setdefault((happened.fault.kind, role), []).append(felt(happened, history, layout))
    order = list(Kind)
    return [
        _row(kind, role, some)
        for (kind, role), some in sorted(found.items(), key=lambda i: (order.index(i[0][0]), i[0][1]))
    ]


def _row(kind: Kind, role: str, some: Iterable[Felt]) -> Row:
    some = list(some)
    gaps = [one.gap_s for one in some if one.gap_s is not None]
    median = statistics.median(gaps) if gaps else None
    backs = [one.fault.well_at - one.fault.over_at for one in some if one.fault.well_at and one.fault.over_at]
    back = statistics.median(backs) if backs else None
    return Row(kind, role, len(some), sum(one.streams for one in some), median, max(gaps, default=None), back)


def _times(exchange: Exchange) -> list[float]:
    ends = [end.at for end in exchange.ends]
    accepted = [] if exchange.accepted_at is None else [exchange.accepted_at]
    return [*accepted, *(piece.at for piece in exchange.pieces), *ends]


def _runs_within(exchange: Exchange, began: float, over: float) -> bool:
    if exchange.behaviour in ("reads slowly", "does not stream"):  # their pauses are their own
        return False
    return exchange.accepted_at is not None and exchange.accepted_at <= over and began < exchange.until


def _concerns(happened: Happened, exchange: Exchange, layout: Layout) -> bool:
    target = happened.fault.target
    if target == "nats":
        return True
    place = layout.place(target)
    if place.role is Role.WORKER:
        over = happened.over_at if happened.over_at is not None else happened.began
        return target in (exchange.worker_at(happened.began), exchange.worker_at(over))
    if place.role is Role.INGRESS:
        return bool(exchange.ingresses) and [name for at, name in exchange.ingresses if at <= happened.began][-1:] == [
            target
        ]
    if place.role is Role.CLIENT:
        return exchange.transport.value == "client" and exchange.tenant == ("public", "acme")[int(target[1:])]
    return True
