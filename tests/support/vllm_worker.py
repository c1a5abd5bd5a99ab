"""Real workers, started as a process starts them, each beside a double of a vLLM server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kvfleet.worker.main import serve
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.settings import WorkerSettings
from kvproto.errors import KvfleetError
from kvservice.lifecycle import Lifecycle
from tests.support.vllm_double.server import VllmDouble, made


@dataclass(eq=False)
class VllmWorker:
    """`stop` is SIGTERM's. What `lifecycle.run` would print and exit with is `refusal` and the life's exit code."""

    settings: WorkerSettings
    double: VllmDouble
    life: Lifecycle = field(default_factory=Lifecycle)
    refusal: str = ""

    async def start(self) -> None:
        try:
            await serve(self.settings, self.life)
        except KvfleetError as error:
            self.refusal = str(error)
            await self.life.close()

    async def stop(self) -> None:
        self.life.stop()
        await self.life.close()


@dataclass(eq=False)
class VllmFleet:
    nats_url: str
    namespace: str
    workers: dict[str, VllmWorker] = field(default_factory=dict)

    async def start(self, worker: str, double: dict[str, Any] | None = None, **settings: Any) -> VllmWorker:
        """`double` says how its server is made."""
        server = await VllmDouble(made(DEMO_FOLDER, **(double or {}))).start()
        usual = {"engine": "vllm", "engine_url": server.url, "drain_s": 2.0, "prestart_s": 1.0}
        chosen = WorkerSettings(id=worker, nats_url=self.nats_url, namespace=self.namespace, **{**usual, **settings})
        self.workers[worker] = VllmWorker(chosen, server)
        await asyncio.wait_for(self.workers[worker].start(), 60)
        return self.workers[worker]

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.stop()
            await worker.double.die()
