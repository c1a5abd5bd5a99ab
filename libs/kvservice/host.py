"""Adapter: the memory and cores that this process may use, by Linux's figures for the host and the cgroup."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """What can still be allocated."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines(CGROUP / "memory.max"), _lines(CGROUP / "memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def cores() -> int:
    """More spinning threads than this slow each other down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for line in _lines(CGROUP / "cpu.max"):
        quota, period = line.split()
        if quota.isdigit():
            allowed = min(allowed, int(quota) // int(period))
    return max(1, allowed)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
