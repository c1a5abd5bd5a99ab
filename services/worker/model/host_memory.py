"""Host memory for blocks: one piece, taken from the system as it is used."""

from __future__ import annotations

import mmap


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
