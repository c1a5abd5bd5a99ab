"""Wiring of a worker process: settings, record and lease, an engine, loop."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from kvfleet.worker.backend import Backend, WorkerProcess, worker_record
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.worker_metrics import readings
from kvproto.members import Lease
from kvproto.messages import Loading, State, WorkerRecord
from kvproto.subjects import WORKER_INBOX
from kvservice import lifecycle
from kvservice.membership import join
from kvservice.metrics import Probes
from kvservice.tracing_start import open_tracer

log = logging.getLogger(__name__)


def backend_of(process: WorkerProcess) -> Backend:
    """A worker imports its own engine's libraries only."""
    if process.settings.engine == "vllm":
        from kvfleet.worker.vllm_backend import VllmBackend

        return VllmBackend(process)
    from kvfleet.worker.own_backend import OwnBackend

    return OwnBackend(process)


async def serve(settings: WorkerSettings, life: lifecycle.Lifecycle) -> None:
    probes = Probes(settings, life)
    tracer = open_tracer(settings, "worker", life)
    connection, subjects, bucket = await join(settings, life, "worker", WORKER_INBOX, prestart_s=settings.prestart_s)
    backend = backend_of(WorkerProcess(settings, life, tracer, connection, subjects))
    served = await backend.find()
    record = worker_record(settings, settings.member, served.bundle, served.slots, served.adapters)
    lease = Lease(bucket, record)
    await lease.take()

    def tell(loading: Loading | None) -> None:
        assert isinstance(lease.record, WorkerRecord)
        if lease.record.state is State.STARTING:
            lease.record = replace(lease.record, loading=loading)

    renewing = lease.run(lambda error: life.fatal(str(error)), lambda: tell(backend.loading()))
    starting = asyncio.create_task(renewing, name="starting-lease")
    life.closing("lease", lease.release)
    await backend.load(record)
    tell(None)
    worker = backend.assemble(lease)
    await backend.start(worker)
    await worker.start()
    starting.cancel()

    async def end() -> None:
        await worker.drain()
        await worker.stop()
        await backend.stop()

    life.closing("worker", end, settings.drain_s + 5.0)
    certificates = {"nats": settings.nats_cert, "data_plane": settings.data_plane_cert}
    probes.ready(readings(worker, connection, certificates) + backend.readings(worker), backend.collectors())
    log.info("worker %s is ready", record.id)


def main() -> None:
    lifecycle.run_service("worker", WorkerSettings, serve)


if __name__ == "__main__":
    main()
