"""What a worker beside vLLM shows to Prometheus beside `worker_metrics`: of its server, and vLLM's own metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import TimeoutError as Late

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_server import VllmServer
from kvfleet.worker.worker_metrics import labelled, plain
from kvproto.errors import EngineFailure
from kvservice.metrics import Reading

log = logging.getLogger(__name__)

OWN = "vllm:"  # what the server shows of its process has the names of ours
SCRAPE_S = 2.0
_SERVER = (
    ("engine_restarts_total", "restarts of the vLLM server, seen by this worker", "restarts_total"),
    ("engine_left_out_blocks_total", "blocks of vLLM's cache that have no name here", "blocks.left_out_total"),
)


def vllm_readings(worker: WorkerLoop, server: VllmServer) -> list[Reading]:
    record = worker.record
    which = "1; its labels say which worker this is, to be joined on the instance"
    return [
        labelled("info", ("worker", "model", "device"), which, lambda: {(record.id, record.model, "vllm"): 1.0}),
        *plain(_SERVER, lambda: server),
    ]


class VllmMetrics(Collector):
    """vLLM's own metrics under their names, asked for at each scrape, on the thread that serves it."""

    def __init__(self, routes: TokenRoutes) -> None:
        self._routes = routes
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        try:
            asking = asyncio.run_coroutine_threadsafe(self._routes.get("/metrics"), self._loop)
            text = asking.result(SCRAPE_S).decode()
            yield from (one for one in text_string_to_metric_families(text) if one.name.startswith(OWN))
        except (EngineFailure, Late, ValueError) as error:
            log.debug("vLLM's metrics are not shown: %s", error)

    def describe(self) -> Iterator[Metric]:
        return iter(())
