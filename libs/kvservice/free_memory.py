"""Adapter: how much memory may still be taken, as Linux says of the host and of our cgroup."""

from __future__ import annotations

import os
from pathlib import Path


def free_bytes() -> int:
    """What may still be allocated without anything else having to go."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    limit, used = _lines(cgroup / "memory.max"), _lines(cgroup / "memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
