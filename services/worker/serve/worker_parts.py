"""What a worker's loop is made of, as its wiring makes it; its desks share it. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.network.tier_network import Meet
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.tiers.remote import RemoteTiers
from kvproto.connection import Connection
from kvproto.members import Lease
from kvproto.messages import Bundle, WorkerRecord
from kvproto.subjects import Subjects
from kvservice import tracing
from kvservice.tracing import Tracer


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """`record` is the lease's as this life begins. `encode_prompt` raises InvalidRequest.

    Of vaults and other workers it has `remote` and `meet`; by default there are none. `somebody_is_ready`: whether
    another worker of this model takes new work, None while that is being found out.
    """

    settings: WorkerSettings
    connection: Connection
    subjects: Subjects
    lease: Lease
    record: WorkerRecord
    engine: EngineThread
    bundle: Bundle
    encode_prompt: Callable[[str], list[int]]
    tracer: Tracer = tracing.NULL
    remote: RemoteTiers | None = None
    somebody_is_ready: Callable[[], bool | None] = lambda: False
    meet: Meet = lambda worker: None
