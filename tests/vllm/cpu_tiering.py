"""vLLM's TieringOffloadingSpec on its CPU build, which refuses it for want of a copy between device and host: here is a
plain one, in place of its CUDA streams. All else is vLLM's own. For the interpreter that has vLLM."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return _PlainCopies(self, kv_caches)


class _PlainCopies(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, spec: CpuTieringSpec, kv_caches: Any) -> None:
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._pairs = [
            (one.tensor, self._region.create_next_worker_view(one.page_size_bytes)) for one in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in zip(src_spec.block_ids, dst_spec.chunk_ids, strict=True):
            for device, host in self._pairs:
                host[int(chunk)].copy_(device[int(block)])
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, block in zip(src_spec.chunk_ids, dst_spec.block_ids, strict=True):
            for device, host in self._pairs:
                device[int(block)].copy_(host[int(chunk)])
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()
