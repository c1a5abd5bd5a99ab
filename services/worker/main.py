"""Wiring of a worker process: settings, model, engine thread, loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import InvalidRequest, Unavailable
from kvproto.ids import base32, is_token, new_epoch
from kvproto.members import Lease
from kvproto.messages import Bundle, State, WorkerRecord
from kvproto.subjects import WORKER_INBOX, Subjects
from kvservice import lifecycle, logs
from kvservice.metrics import LiveCollector, MetricsServer
from kvservice.nats_connection import connect
from kvservice.settings import load
from services.worker.bundle import bundle_hash, read_bundle
from services.worker.cache_events import CacheEvents
from services.worker.engine import Engine
from services.worker.engine_factory import build_engine
from services.worker.engine_thread import EngineThread
from services.worker.loop import WorkerLimits, WorkerLoop
from services.worker.model_folder import resolve_model, served_name
from services.worker.settings import WorkerSettings
from services.worker.worker_metrics import readings

log = logging.getLogger(__name__)


async def open_bucket(connection: Connection, name: str, patience_s: float) -> Bucket:
    """The bucket may be created at the same moment as this process starts: wait for it, within reason."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return await Bucket.open(connection, name)
        except Unavailable:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.25)


def prompt_encoder(bundle: Bundle, vocab_size: int) -> Callable[[str], list[int]]:
    """Text prompts of bare producers are tokenised here; the ingress sends ids."""
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
        if not ids:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        return ids

    return encode


async def serve(settings: WorkerSettings, life: lifecycle.Lifecycle) -> None:
    epoch = new_epoch()
    worker = settings.id or f"w-{base32(os.urandom(5))}"
    if not is_token(worker):
        raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="id")
    subjects = Subjects(settings.namespace)
    loop = asyncio.get_running_loop()

    connection = await connect(
        settings,
        role="worker",
        role_inbox=WORKER_INBOX,
        member=worker,
        on_closed=lambda: life.fatal("the NATS connection is closed for good"),
    )
    life.closing("connection", connection.close)
    bucket = await open_bucket(connection, subjects.members_bucket, 10.0)

    folder = await loop.run_in_executor(None, resolve_model, settings.model)
    name = settings.served_model_name or served_name(settings.model)
    bundle = read_bundle(
        folder, name, load_format=settings.load_format, dtype=settings.dtype, block_size=settings.block_size
    )
    record = WorkerRecord(
        id=worker,
        epoch=epoch,
        lease="",
        state=State.STARTING,
        model=name,
        address=f"{settings.host}:{os.getpid()}",
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=codec.supported_versions(),
        bundle=bundle_hash(bundle),
        model_revision=bundle.model_revision,
        block_size=settings.block_size,
        context_length=bundle.context_length,
        slots=settings.slots,
        started_unix_ms=int(time.time() * 1000),
    )
    lease = Lease(bucket, record)
    await lease.register()
    starting = asyncio.create_task(lease.run(lambda error: life.fatal(str(error))), name="starting-lease")
    life.closing("lease", lease.release)
    log.info("loading %s from %s", name, folder)
    began = time.monotonic()
    engine = await loop.run_in_executor(None, build_engine, settings, folder, bundle)
    log.info("loaded in %.1f s: %d blocks", time.monotonic() - began, engine.pool.num_blocks)
    starting.cancel()
    await _run(settings, life, connection, subjects, lease, engine, bundle)


async def _run(
    settings: WorkerSettings,
    life: lifecycle.Lifecycle,
    connection: Connection,
    subjects: Subjects,
    lease: Lease,
    engine: Engine,
    bundle: Bundle,
) -> None:
    record = lease.record
    assert isinstance(record, WorkerRecord)
    results: list[WorkerLoop] = []
    thread = EngineThread(
        engine,
        lambda steps: results[0].on_results(steps),
        asyncio.get_running_loop(),
        on_crash=lambda error: results[0].on_crash(error),
    )
    lease.record = WorkerRecord(
        **{**{f: getattr(record, f) for f in WorkerRecord.__slots__}, "blocks": engine.pool.num_blocks}
    )
    worker = WorkerLoop(
        connection,
        subjects,
        lease,
        thread,
        CacheEvents(record.epoch),
        bundle,
        prompt_encoder(bundle, engine.runner.vocab_size),
        WorkerLimits(settings.waiting, settings.fleet_key.encode(), settings.drain_s),
        life.fatal,
    )
    results.append(worker)
    thread.start()
    await worker.start()

    async def end() -> None:
        await worker.drain()
        await worker.stop()
        await asyncio.get_running_loop().run_in_executor(None, thread.stop)

    life.closing("worker", end, settings.drain_s + 5.0)
    if settings.metrics_port is not None:
        registry = CollectorRegistry()
        registry.register(LiveCollector(readings(worker, connection)))
        server = MetricsServer(registry, settings.host, settings.metrics_port, lambda: not life.stopping.is_set())
        life.closing("metrics", server.close)
        log.info("metrics on http://%s:%d/metrics", settings.host, server.port)
    log.info("worker %s is ready", record.id)


def main(argv: list[str] | None = None) -> None:
    settings = load(WorkerSettings, sys.argv[1:] if argv is None else argv, "kvfleet worker")
    logs.set_up(f"worker-{settings.id or '?'}", settings)
    lifecycle.run("kvfleet worker", lambda life: serve(settings, life), parent_pid=settings.parent_pid)


if __name__ == "__main__":
    main()
