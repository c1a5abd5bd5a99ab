"""Short ways to make what placement's tests talk about."""

from __future__ import annotations

import numpy as np

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import GenerateAsked, WorkerRegistered
from kvfleet.placement.workers.price_kernel import BACKLOG
from kvfleet.placement.workers.prompts import HashedPrompts
from kvfleet.placement.workers.workloads import Workloads
from kvproto.messages import (
    Accepted,
    Encoding,
    Failed,
    Finished,
    FinishReason,
    Heartbeat,
    Load,
    Milestone,
    Passed,
    PlaceRequest,
    ProducerRequest,
    Rates,
    State,
    WorkerRecord,
)

MODEL = "demo"
PREFIX = "_plc.p1"
FLEET_KEY = b"key"
INBOX = "_INBOX.somebody"


def a_record(worker: str, *, epoch: str = "e1", state: State = State.READY, model: str = MODEL) -> WorkerRecord:
    return WorkerRecord(
        id=worker, epoch=epoch, lease="l", state=state, model=model, address="", host="h", pid=1, versions=(1, 1),
        attaches=True,
    )  # fmt: skip


def a_beat(
    worker: str,
    *,
    epoch: str = "e1",
    state: State = State.READY,
    waiting: int = 0,
    running: int = 0,
    queued: int = 0,
    rate: float = 0.0,
) -> Heartbeat:
    return Heartbeat(
        worker, epoch, state, Load(waiting=waiting, running=running, queued_prefill_tokens=queued), Rates(rate)
    )


def a_core(
    *workers: str,
    policy: str = "bounded_ring",
    chance: float = 0.0,
    limit: int = 100,
    shares: bool = False,
    max_producer_priority: int = 0,
) -> PlacementCore:
    core = PlacementCore(
        "p1",
        PREFIX,
        lambda: chance,
        PlacementConfig(
            policy=policy,
            index_blocks=4096,
            max_wait_s=None,
            max_producer_priority=max_producer_priority,
            max_forwarded=limit,
            shares=shares,
        ),
        prompts=HashedPrompts(FLEET_KEY),
        unix_ms=lambda: 1_000_000,
    )
    for worker in workers:
        core.handle(WorkerRegistered(a_record(worker)), 0.0)
    return core


def an_acceptance(request: str, tenant: str = "public") -> Milestone:
    return Milestone(tenant, request, 0, Passed.ACCEPTED, 0.0)


def load_of(core: PlacementCore, worker: str) -> float:
    """Requests reported and booked."""
    return requests_in(core.workloads, core.fleet.workers[worker].column)


def requests_in(workloads: Workloads, column: int) -> float:
    return float(workloads.view(np.array([column]), workloads.now).requests[0])


def backlog_in(workloads: Workloads, column: int) -> float:
    """Prompt tokens queued when the column last changed."""
    return float(workloads.view(np.array([column]), workloads.now).values[BACKLOG, 0])


def an_ask(request: str = "r1", **fields: object) -> PlaceRequest:
    return PlaceRequest(**({"request": request, "model": MODEL, "prompt_ids": (1, 2, 3)} | fields))  # type: ignore[arg-type]


def a_generate(
    request: str = "r1",
    *,
    tenant: str = "public",
    token: str = MODEL,
    encoding: Encoding = Encoding.MSGPACK,
    unix_ms: int = 1_000_000,
    inbox: str = INBOX,
    **fields: object,
) -> GenerateAsked:
    ask = ProducerRequest(**({"prompt": "hello"} | fields))  # type: ignore[arg-type]
    return GenerateAsked(inbox, encoding, tenant, token, request, 7, unix_ms, ask)


def accepted(request: str, attempt: int, worker: str, epoch: str = "e1") -> Accepted:
    return Accepted(request, attempt, worker, epoch)


def finished(request: str, attempt: int) -> Finished:
    return Finished(request, attempt, FinishReason.STOP, 3, 5)


def failed(request: str, attempt: int, code: str, *, retryable: bool) -> Failed:
    return Failed(request, attempt, code, "because", retryable)
