"""Memory and utilisation: of this process here; of a GPU from stand-ins for NVML and torch, as there is none here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvfleet.worker.model.device_watch import CpuWatch, GpuWatch, watch_device


class NVMLError(Exception):
    pass


def stand_ins(monkeypatch: pytest.MonkeyPatch, *, driver: bool) -> Any:
    def init() -> None:
        if not driver:
            raise NVMLError("Driver Not Loaded")

    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.nvmlInit = init
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=30, total=80)
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=75)
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=f"of-{device}"), mem_get_info=lambda device: (60, 80)
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return nvml


def test_the_cpu_is_this_process() -> None:
    watch = watch_device("cpu")
    used, total = watch.memory()
    assert isinstance(watch, CpuWatch)
    assert 0 < used < total
    assert watch.utilisation() is None


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    nvml = stand_ins(monkeypatch, driver=True)
    nvml.nvmlDeviceGetHandleByUUID = asked.append
    watch = watch_device("cuda:1")
    assert asked == ["GPU-of-cuda:1"]
    assert watch.memory() == (30, 80)
    assert watch.utilisation() == 0.75
    assert watch.device == "cuda:1"


def test_a_slice_of_a_gpu_has_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(handle: object) -> object:
        raise NVMLError("Not Supported")

    nvml = stand_ins(monkeypatch, driver=True)
    nvml.nvmlDeviceGetUtilizationRates = refused
    assert GpuWatch("cuda:0").utilisation() is None


def test_without_nvml_torch_knows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch, driver=False)
    watch = GpuWatch("cuda:0")
    assert watch.memory() == (20, 80)
    assert watch.utilisation() is None
