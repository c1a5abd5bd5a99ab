"""What an engine brings into a worker process, and what every worker process has besides.

find    what it serves ──▶ the worker's record, which says `starting`
load    the model, or nothing where another process has it
assemble, start, stop    the worker's loop around it
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from prometheus_client.registry import Collector

from kvfleet.worker.engine.bundle import bundle_hash
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.settings import WorkerSettings
from kvproto import codec
from kvproto.block_hash import public_prefix
from kvproto.connection import Connection
from kvproto.ids import new_epoch
from kvproto.members import Lease
from kvproto.messages import Adapter, Bundle, Loading, State, WorkerRecord, WorkerRole
from kvproto.subjects import Subjects
from kvservice.lifecycle import Lifecycle
from kvservice.metrics import Reading
from kvservice.tracing import Tracer


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """What a worker process is given."""

    settings: WorkerSettings
    life: Lifecycle
    tracer: Tracer
    connection: Connection
    subjects: Subjects


@dataclass(frozen=True, slots=True)
class Served:
    """`slots`: sequences that run at once."""

    bundle: Bundle
    slots: int
    adapters: tuple[Adapter, ...] = ()


class Backend(Protocol):
    async def find(self) -> Served:
        """Raises a KvfleetError that says in one line why nothing can be served."""
        ...

    async def load(self, record: WorkerRecord) -> None: ...

    def loading(self) -> Loading | None:
        """What it does until the worker is ready, as far as it can tell."""
        ...

    def assemble(self, lease: Lease) -> WorkerLoop: ...

    async def start(self, worker: WorkerLoop) -> None:
        """Until the worker can say that it is ready."""
        ...

    async def stop(self) -> None: ...

    def readings(self, worker: WorkerLoop) -> list[Reading]: ...

    def collectors(self) -> list[Collector]:
        """Of metrics that are another process's."""
        ...


def worker_record(
    settings: WorkerSettings, worker: str, bundle: Bundle, slots: int, adapters: tuple[Adapter, ...] = ()
) -> WorkerRecord:
    return WorkerRecord(
        id=worker,
        epoch=new_epoch(),
        lease="",
        state=State.STARTING,
        model=bundle.model,
        address=socket.gethostname(),
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=codec.supported_versions(),
        bundle=bundle_hash(bundle),
        model_revision=bundle.model_revision,
        block_size=settings.block_size,
        context_length=bundle.context_length,
        slots=slots,
        started_unix_ms=int(time.time() * 1000),
        public_prefixes=tuple(public_prefix(ids) for ids in bundle.public_prefixes),
        attaches=True,
        engine=settings.engine,
        adapters=adapters,
        grammars=find_spec("llguidance") is not None,
        chats=True,
        scores=True,
        beams=settings.engine == "own",
        role=WorkerRole(settings.role),
        pauses=settings.engine == "own",
    )
