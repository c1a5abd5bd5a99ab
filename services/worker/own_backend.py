"""Wiring of a worker around the own engine: model, tiers, engine thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from kvfleet.worker.backend import Backend, Served, WorkerProcess
from kvfleet.worker.engine.bundle import read_bundle, read_public_prefixes
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.model.device_watch import watch_device
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.model.model_folder import resolve_model, served_name
from kvfleet.worker.network.engine_tiers import EngineTiers
from kvfleet.worker.network.successors import Successors
from kvfleet.worker.network.tier_network import TierNetwork
from kvfleet.worker.own_metrics import own_readings
from kvfleet.worker.serve.demand import preload
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.text.model_text import ModelText
from kvproto.connection import Connection
from kvproto.members import Lease
from kvproto.messages import Bundle, Loading, WorkerRecord
from kvproto.subjects import Subjects
from kvservice import lifecycle, tracing
from kvservice.data_plane import runtime_folder
from kvservice.metrics import Reading
from kvservice.tracing import Tracer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class OwnBackend(Backend):
    process: WorkerProcess
    progress: LoadProgress = field(default_factory=LoadProgress)

    async def find(self) -> Served:
        settings = self.process.settings
        self._folder = await lifecycle.in_daemon_thread(lambda: resolve_model(settings.model))
        self._bundle = read_bundle(
            self._folder,
            settings.served_model_name or served_name(settings.model),
            load_format=settings.load_format,
            dtype=settings.dtype,
            block_size=settings.block_size,
            public_prefixes=read_public_prefixes(settings.public_prefixes_file),
            tool_format=settings.tool_format or "",
        )
        return Served(self._bundle, settings.slots)

    async def load(self, record: WorkerRecord) -> None:
        process, settings, folder, bundle = self.process, self.process.settings, self._folder, self._bundle
        log.info("loading %s from %s", bundle.model, folder)
        began = time.monotonic()
        runtime = runtime_folder(settings, process.life)
        self._network = network = TierNetwork(settings, record.id, record.host, runtime, process.tracer)
        self._engine = await lifecycle.in_daemon_thread(
            lambda: build_engine(settings, folder, bundle, network.remote_for, self.progress)
        )
        log.info("loaded in %.1f s: %d blocks", time.monotonic() - began, self._engine.pool.num_blocks)

    def loading(self) -> Loading | None:
        return self.progress.now()

    def assemble(self, lease: Lease) -> WorkerLoop:
        one, life = self.process, self.process.life
        worker, self._thread = assemble(
            one.settings, one.connection, one.subjects, lease, self._engine, self._bundle, life.fatal, self._network,
            on_drain=life.stop, tracer=one.tracer,
        )  # fmt: skip
        self._successors = Successors(one.connection, one.subjects, worker.record)
        worker.parts.somebody_is_ready = self._successors.somebody_is_ready
        worker.parts.somebody_decodes = self._successors.somebody_decodes
        return worker

    async def start(self, worker: WorkerLoop) -> None:
        self._thread.start()
        await self._network.follow(self.process.connection, self.process.subjects, worker.record)
        self.progress.doing = "fetching blocks"
        await preload(worker.parts)

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        await self._successors.stop()
        await self._network.stop()
        await loop.run_in_executor(None, self._thread.stop)
        await loop.run_in_executor(None, self._engine.tiers.close)

    def readings(self, worker: WorkerLoop) -> list[Reading]:
        network, watch = self._network, watch_device(self._engine.runner.device)
        return own_readings(worker, self._thread, watch, network.remote, lambda: network.served)

    def collectors(self) -> list[Collector]:
        return []


def assemble(
    settings: WorkerSettings,
    connection: Connection,
    subjects: Subjects,
    lease: Lease,
    engine: Engine,
    bundle: Bundle,
    on_fatal: Callable[[str], None],
    network: TierNetwork | None = None,
    *,
    on_drain: Callable[[], None] = lambda: None,
    tracer: Tracer = tracing.NULL,
) -> tuple[WorkerLoop, EngineThread]:
    """A worker that is not started yet: `thread.start()`, then `await loop.start()`."""
    assert isinstance(lease.record, WorkerRecord)
    thread = EngineThread(
        engine,
        lambda steps: worker.on_results(steps),
        asyncio.get_running_loop(),
        on_crash=lambda error: worker.on_crash(error),
    )
    engine.tiers.wake = thread.wake
    lends = network is not None and network.remote is not None
    data_plane = network.listen(engine.tiers, thread.post) if network is not None and lends else ()
    lease.record = replace(
        lease.record,
        blocks=thread.facts.blocks,
        block_bytes=thread.facts.block_bytes,
        data_plane=data_plane,
        kv_format=thread.facts.kv_format,
    )
    text = ModelText(Tokenizer.from_str(bundle.tokenizer_json))
    tiers = EngineTiers(thread, network, settings.block_size, settings.fleet_key.encode())
    parts = WorkerParts(settings, connection, subjects, lease, thread, tiers, bundle, text, tracer)
    worker = WorkerLoop(parts, on_fatal, on_drain)
    return worker, thread
