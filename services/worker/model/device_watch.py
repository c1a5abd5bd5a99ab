"""Adapter: memory and utilisation of the device that this worker computes on, for scrapes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

CPU = "cpu"


class CpuWatch:
    """This process's memory, of what its host or cgroup has."""

    device = CPU

    def memory(self) -> tuple[int, int]:
        """Bytes used, and all there are."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        except OSError:
            limit = "max"
        return resident, min(total, int(limit)) if limit.isdigit() else total

    def utilisation(self) -> float | None:
        """Share of the last moment in which the device was busy; None: unknown."""
        return None


class GpuWatch:
    """From NVML, without which torch knows the memory alone."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._nvml, self._handle = self._open()

    def memory(self) -> tuple[int, int]:
        if self._nvml is not None:
            info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            return int(info.used), int(info.total)
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free), int(total)

    def utilisation(self) -> float | None:
        if self._nvml is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except self._nvml.NVMLError:  # a MIG slice has none
            return None

    def _open(self) -> tuple[Any, Any]:
        """By UUID, as NVML counts devices otherwise than torch, which obeys CUDA_VISIBLE_DEVICES."""
        try:
            import pynvml  # type: ignore[import-untyped]
            import torch

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as error:  # noqa: BLE001 - no driver, no library, no such device: torch is left
            log.info("%s: no NVML (%s): its utilisation is not shown", self.device, error)
            return None, None


DeviceWatch: TypeAlias = CpuWatch | GpuWatch


def watch_device(device: str) -> DeviceWatch:
    """`device` as torch names it."""
    return CpuWatch() if device.partition(":")[0] == CPU else GpuWatch(device)
