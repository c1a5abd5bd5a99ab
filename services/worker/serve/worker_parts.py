"""What a worker's loop is made of, as its wiring makes it; its desks share it. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.engine.outputs import KvPublisher
from kvfleet.worker.network.peers import Meet
from kvfleet.worker.serve.request_intake import WorkerLimits
from kvfleet.worker.tiers.base import Remote
from kvproto.connection import Connection
from kvproto.members import Lease
from kvproto.messages import Bundle, WorkerRecord
from kvproto.subjects import Subjects
from kvservice import tracing
from kvservice.tracing import Tracer


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Vaults and other workers, as far as this one deals with them; by default there are none.

    `has_successor`: whether another worker of this model takes new work, None while that is being found out.
    """

    remote: Remote | None = None
    has_successor: Callable[[], bool | None] = lambda: False
    meet: Meet = lambda worker: None


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """`record` is the lease's as this life begins. `encode_prompt` raises InvalidRequest."""

    connection: Connection
    subjects: Subjects
    lease: Lease
    record: WorkerRecord
    engine: EngineThread
    publisher: KvPublisher
    bundle: Bundle
    encode_prompt: Callable[[str], list[int]]
    limits: WorkerLimits
    neighbours: Neighbours
    tracer: Tracer = tracing.NULL
