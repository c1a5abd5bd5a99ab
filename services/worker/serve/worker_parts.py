"""The parts that a worker's loop and its desks share. The event loop owns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvfleet.worker.port.engine_port import AdapterPort, EnginePort, TextPort, TierPort
from kvfleet.worker.port.outputs import KvPublisher
from kvfleet.worker.serve.broadcast import Broadcast
from kvfleet.worker.serve.served_models import ServedModels
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.streams.frames import FrameBook
from kvfleet.worker.streams.milestones import MilestoneLog
from kvfleet.worker.streams.outbox import Outbox
from kvproto.connection import Connection
from kvproto.members import Lease
from kvproto.messages import Bundle, WorkerRecord
from kvproto.subjects import Subjects
from kvservice import tracing
from kvservice.tracing import Tracer


@dataclass(eq=False)
class WorkerParts:
    """`somebody_is_ready`: whether another worker of this model takes new work,
    and one for each of the models that it is told; None if unknown yet. `somebody_decodes`: the same of those that are
    not for prompts alone."""

    settings: WorkerSettings
    connection: Connection
    subjects: Subjects
    lease: Lease
    engine: EnginePort
    tiers: TierPort
    bundle: Bundle
    text: TextPort
    tracer: Tracer = tracing.NULL
    somebody_is_ready: Callable[[Iterable[str]], bool | None] = lambda models: False
    somebody_decodes: Callable[[Iterable[str]], bool | None] = lambda models: None
    adapters: AdapterPort | None = None
    record: WorkerRecord = field(init=False)
    models: ServedModels = field(init=False)
    milestones: MilestoneLog = field(init=False)
    frames: FrameBook = field(init=False)
    outbox: Outbox = field(init=False)
    broadcast: Broadcast = field(init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.lease.record, WorkerRecord)
        self.record = me = self.lease.record
        publisher = KvPublisher(me.epoch)
        self.models = ServedModels(me, self.settings.fleet_key.encode())
        self.milestones = MilestoneLog(me.id, me.epoch)
        self.frames = FrameBook(me.id, self.milestones)
        self.outbox = Outbox(self.connection, self.frames.leases)
        self.broadcast = Broadcast(self.connection, self.outbox, self.subjects, me.id, publisher, self.milestones)
