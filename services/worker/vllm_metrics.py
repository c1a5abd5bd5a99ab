"""What a worker beside vLLM shows to Prometheus beside `worker_metrics`."""

from __future__ import annotations

from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.vllm.vllm_server import VllmServer
from kvfleet.worker.worker_metrics import labelled, plain
from kvservice.metrics import Reading

_SERVER = (("engine_restarts_total", "restarts of the vLLM server, seen by this worker", "restarts_total"),)


def vllm_readings(worker: WorkerLoop, server: VllmServer) -> list[Reading]:
    record = worker.record
    which = "1; its labels say which worker this is, to be joined on the instance"
    return [
        labelled("info", ("worker", "model", "device"), which, lambda: {(record.id, record.model, "vllm"): 1.0}),
        *plain(_SERVER, lambda: server),
    ]
