"""Wiring of a worker process: settings, model, engine thread, loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from tokenizers import Tokenizer

from kvfleet.worker.engine.bundle import bundle_hash, read_bundle, read_public_prefixes
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.model.device_watch import watch_device
from kvfleet.worker.model.model_folder import resolve_model, served_name
from kvfleet.worker.network.engine_tiers import EngineTiers
from kvfleet.worker.network.tier_network import TierNetwork
from kvfleet.worker.serve.demand import preload
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.worker_metrics import readings
from kvproto import codec
from kvproto.block_hash import public_prefix
from kvproto.connection import Connection
from kvproto.errors import InvalidRequest
from kvproto.ids import new_epoch
from kvproto.members import Lease
from kvproto.messages import Bundle, State, WorkerRecord
from kvproto.subjects import WORKER_INBOX, Subjects
from kvservice import lifecycle, tracing
from kvservice.data_plane import runtime_folder
from kvservice.membership import join
from kvservice.metrics import Probes
from kvservice.tracing import Tracer
from kvservice.tracing_start import open_tracer

log = logging.getLogger(__name__)


def prompt_encoder_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """For text prompts of bare producers; the ingress sends ids. The encoder raises InvalidRequest."""

    def encode(text: str) -> list[int]:
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise InvalidRequest(f"the prompt cannot be tokenised: {str(error)[:200]}", field="prompt") from None
        if not ids:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        return ids

    return encode


def worker_record(settings: WorkerSettings, worker: str, name: str, bundle: Bundle) -> WorkerRecord:
    return WorkerRecord(
        id=worker,
        epoch=new_epoch(),
        lease="",
        state=State.STARTING,
        model=name,
        address=socket.gethostname(),
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=codec.supported_versions(),
        bundle=bundle_hash(bundle),
        model_revision=bundle.model_revision,
        block_size=settings.block_size,
        context_length=bundle.context_length,
        slots=settings.slots,
        started_unix_ms=int(time.time() * 1000),
        public_prefixes=tuple(public_prefix(ids) for ids in bundle.public_prefixes),
        attaches=True,
    )


async def serve(settings: WorkerSettings, life: lifecycle.Lifecycle) -> None:
    probes = Probes(settings, life)
    tracer = open_tracer(settings, "worker", life)
    member = settings.member
    loop = asyncio.get_running_loop()

    connection, subjects, bucket = await join(settings, life, "worker", WORKER_INBOX, prestart_s=settings.prestart_s)

    folder = await lifecycle.in_daemon_thread(lambda: resolve_model(settings.model))
    name = settings.served_model_name or served_name(settings.model)
    bundle = read_bundle(
        folder,
        name,
        load_format=settings.load_format,
        dtype=settings.dtype,
        block_size=settings.block_size,
        public_prefixes=read_public_prefixes(settings.public_prefixes_file),
    )
    record = worker_record(settings, member, name, bundle)
    lease = Lease(bucket, record)
    await lease.renew()
    starting = asyncio.create_task(lease.run(lambda error: life.fatal(str(error))), name="starting-lease")
    life.closing("lease", lease.release)
    log.info("loading %s from %s", name, folder)
    began = time.monotonic()
    network = TierNetwork(settings, record.id, record.host, runtime_folder(settings, life), tracer)
    engine = await lifecycle.in_daemon_thread(lambda: build_engine(settings, folder, bundle, network.remote_for))
    log.info("loaded in %.1f s: %d blocks", time.monotonic() - began, engine.pool.num_blocks)

    worker, thread = assemble(
        settings, connection, subjects, lease, engine, bundle, life.fatal, network, on_drain=life.stop, tracer=tracer
    )
    thread.start()
    await network.follow(connection, subjects, worker.record)
    await preload(worker.parts)
    await worker.start()
    starting.cancel()

    async def end() -> None:
        await worker.drain()
        await worker.stop()
        await network.stop()
        await loop.run_in_executor(None, thread.stop)
        await loop.run_in_executor(None, engine.tiers.close)

    life.closing("worker", end, settings.drain_s + 5.0)
    watch = watch_device(engine.runner.device)
    certificates = {"nats": settings.nats_cert, "data_plane": settings.data_plane_cert}
    probes.ready(readings(worker, connection, thread, watch, network.remote, lambda: network.served, certificates))
    log.info("worker %s is ready", record.id)


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
    data_plane = network.listen(engine.tiers, thread) if network is not None and network.remote is not None else ()
    lease.record = replace(
        lease.record,
        blocks=thread.facts.blocks,
        block_bytes=thread.facts.block_bytes,
        data_plane=data_plane,
        kv_format=thread.facts.kv_format,
    )
    encode_prompt = prompt_encoder_of(Tokenizer.from_str(bundle.tokenizer_json))
    tiers = EngineTiers(thread, network, settings.block_size, settings.fleet_key.encode())
    parts = WorkerParts(settings, connection, subjects, lease, thread, tiers, bundle, encode_prompt, tracer)
    if network is not None:
        parts.somebody_is_ready = network.somebody_is_ready
    worker = WorkerLoop(parts, on_fatal, on_drain)
    return worker, thread


def main() -> None:
    lifecycle.run_service("worker", WorkerSettings, serve)


if __name__ == "__main__":
    main()
