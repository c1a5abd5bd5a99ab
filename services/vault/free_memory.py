"""How much memory a vault takes unless told. Adapter: reads what Linux says of the host and of our cgroup."""

from __future__ import annotations

import os
from pathlib import Path

FRACTION = 0.25
MOST_BYTES = 8 * 2**30
LEAST_BYTES = 64 * 2**20


def default_max_bytes() -> int:
    return max(LEAST_BYTES, min(MOST_BYTES, int(free_bytes() * FRACTION)))


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
