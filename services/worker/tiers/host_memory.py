"""Host memory for blocks: one piece, taken from the system as it is used."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def host_memory(size: int) -> memoryview:
    """`size` zero bytes on huge pages where the system has them; nothing is taken before it is touched.

    Raises MemoryError if there is no room for it.
    """
    try:
        pages = mmap.mmap(-1, max(size, 1))
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def host_free_bytes() -> int:
    """Memory that may still be taken on this host, within this process's cgroup."""
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
