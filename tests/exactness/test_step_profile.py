"""What a step takes of a device's memory: measured at start, and known when it is not there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import make_model

from kvcpu.blocks import KvShape
from kvfleet.worker.engine.engine_factory import _torch_runner
from kvfleet.worker.model import kv_pool
from kvfleet.worker.model.attention import choice
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.gpu import memory_profile
from kvfleet.worker.model.gpu.memory_profile import meter_of, step_bytes
from kvfleet.worker.model.kv_pool import blocks_that_fit, free_bytes, share_of_free
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvfleet.worker.settings import WorkerSettings
from kvproto.errors import OutOfMemory
from kvsampling.draw import Drawn
from kvsampling.sampler import is_out_of_memory


class CountingMeter:
    """Says that a step takes so many bytes, as a GPU would."""

    def __init__(self) -> None:
        self.ended = 0

    def begin(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 1_000

    def end(self) -> None:
        self.ended += 1


def runner_of(blocks: int) -> TorchRunner:
    return TorchRunner(adopt_model(make_model("llama")), ReferenceBackend(), blocks, 16)


@pytest.mark.parametrize(("most", "steps"), [(1_000, [40]), (25, [40, 20]), (3, [40, 20, 10, 5, 2])])
def test_the_largest_step_is_measured_before_the_pool_is_made(
    most: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    run = TorchRunner.run

    def limited(runner: TorchRunner, slices: Sequence[Slice]) -> list[Drawn]:
        tried.append(len(slices[0].ids))
        if tried[-1] > most:
            raise OutOfMemory("the scores are too large")
        return run(runner, slices)

    monkeypatch.setattr(TorchRunner, "run", limited)
    meter = CountingMeter()
    assert step_bytes(runner_of, meter, 40, 7) == (1_100, 1_100)  # type: ignore[arg-type]
    assert (tried, meter.ended) == ([*steps, 1], len(steps) + 1)
    assert step_bytes(runner_of, None, 40, 7) == (0, 0)
    assert meter_of(torch.device("cpu")) is None


@pytest.mark.parametrize(("eager", "left"), [(False, 2_200), (True, 1_100)])
def test_a_worker_without_a_number_of_blocks_has_those_that_its_steps_leave(
    eager: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded decode steps keep their memory."""
    told: list[int] = []

    def noted(shape: KvShape, block_size: int, device: torch.device, share: float, step: int) -> int:
        told.append(step)
        return 16

    monkeypatch.setattr(memory_profile, "meter_of", lambda device: CountingMeter())
    monkeypatch.setattr(kv_pool, "blocks_that_fit", noted)
    runner = _torch_runner(WorkerSettings(id="w0", threads=1, enforce_eager=eager), DEMO_FOLDER, LoadProgress())
    assert (told, runner.num_blocks) == ([left], 16)


def test_a_gpus_attention_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measured the largest step is what serves."""
    tried: list[object] = []

    def noted(backend: object, *_: object) -> str:
        tried.append(backend)
        return ""

    monkeypatch.setattr(choice, "differs", noted)
    monkeypatch.setattr(memory_profile, "meter_of", lambda device: CountingMeter())
    monkeypatch.setattr(kv_pool, "blocks_that_fit", lambda *_: 16)
    settings = WorkerSettings(id="w0", threads=1, attention="triton", slots=2, step_tokens=32)
    runner = _torch_runner(settings, DEMO_FOLDER, LoadProgress())
    assert tried == [runner._backend]  # type: ignore[attr-defined]


def test_what_the_largest_step_takes_is_left_free() -> None:
    cpu = torch.device("cpu")
    shape = KvShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    free = free_bytes(cpu)
    left = free // 10
    most = blocks_that_fit(shape, 16, cpu, 0.9, free - left) * shape.bytes_per_block(16)
    assert 0.5 * left < most < 1.4 * left
    with pytest.raises(OutOfMemory, match="steps of"):
        blocks_that_fit(shape, 16, cpu, 0.9, 2 * free)


def test_a_gpu_is_one_workers_and_a_host_is_shared() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert share_of_free(None, gpu, 4) == 0.9
    assert share_of_free(None, cpu, 4) == 0.3 / 4
    assert (share_of_free(0.5, gpu, 4), share_of_free(0.5, cpu, 4)) == (0.5, 0.125)


@pytest.mark.parametrize(
    "says",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_what_a_device_says_when_its_memory_is_full(says: str) -> None:
    assert is_out_of_memory(RuntimeError(says))
    assert not is_out_of_memory(ValueError(says))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
