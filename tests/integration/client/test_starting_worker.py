"""A worker that loads says in its record what it does, and no more once it is ready."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvfleet.worker import own_backend
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.main import serve
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.settings import WorkerSettings
from kvproto.connection import Connection
from kvproto.members import Members
from kvproto.messages import State, WorkerRecord
from kvproto.subjects import Subjects
from kvservice.lifecycle import Lifecycle
from tests.support.waiting import LIMIT_S, until


async def test_the_record_tells_what_the_worker_does_until_it_is_ready(
    nats_url: str, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    weights_were_seen = threading.Event()

    def slowly(
        settings: WorkerSettings, folder: object, bundle: object, remote: object, progress: LoadProgress
    ) -> Engine:
        progress.doing = "loading weights"
        assert weights_were_seen.wait(LIMIT_S)
        return build_engine(settings, folder, bundle, remote, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(own_backend, "build_engine", slowly)
    settings = WorkerSettings(id="w0", nats_url=nats_url, namespace=fleet_buckets.namespace, runner="fake", drain_s=0.5)
    life = Lifecycle()
    connection = await Connection.open(nats_url, name="watching", inbox_prefix="_adm.watching")
    members = Members(connection, fleet_buckets, hears=False)
    await members.start()
    serving = asyncio.create_task(serve(settings, life))

    def record() -> WorkerRecord | None:
        view = members.view.workers.get("w0")
        if view is not None and view.record.loading is not None:
            assert view.record.state is State.STARTING
            seen.add(view.record.loading.doing)
        return None if view is None else view.record

    try:
        await until(lambda: record() and "loading weights" in seen)
        weights_were_seen.set()
        ready = await until(lambda: (one := record()) and one.state is State.READY and one)
        assert ready
        assert ready.loading is None
        await serving
        before = members.view.workers["w0"].revision
        await until(lambda: members.view.workers["w0"].revision > before)  # it was renewed since
        assert members.view.workers["w0"].record.loading is None
    finally:
        weights_were_seen.set()
        life.stop()
        await life.close()
        await members.stop()
        await connection.close()
