"""Large pieces of host memory for what is read from end to end in every step: weights and KV."""

from __future__ import annotations

import ctypes
import logging
import mmap
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

HUGE_PAGE = 2 * 1024 * 1024
LEAST_AHEAD, MOST_AHEAD = 32 * 1024 * 1024, 512 * 1024 * 1024  # bytes taken beyond what is in use: as many as that
AT_ONCE = 64 * 1024 * 1024
MADV_POPULATE_WRITE = 23  # <sys/mman.h>, Linux 5.14
LARGEST_KEPT = 1 << 30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # <malloc.h>


def huge_pages(size: int) -> Tensor:
    """`[size]` zeros of uint8, on huge pages where the system has them: 4-KiB pages cost a fifth of the read
    rate. Pages are taken when they are first touched. Raises MemoryError if there is no room."""
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, dtype=np.uint8)
    skipped = -whole.ctypes.data % HUGE_PAGE  # a huge page begins at a multiple of its size
    return torch.from_numpy(whole[skipped : skipped + size])


class PagesAhead:
    """Takes the pages of `huge_pages` from the system, in a thread of its own, before they are first written.

    The system zeroes a page when it is taken: 3 to 5 % of the time of a prompt on fresh blocks. As much is taken ahead
    as is in use, within limits, so that an idle worker does not fill a laptop.
    """

    def __init__(self, memory: Tensor) -> None:
        self._address, self._size = memory.data_ptr(), memory.nbytes
        self._taken = 0
        self._madvise = None
        if self._size >= AT_ONCE:  # else it is no matter
            self._madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
        self._thread: ThreadPoolExecutor | None = None

    def reach(self, used: int) -> Future[None] | None:
        """The first `used` bytes are in use. Returns at once, with a future if more pages are being taken."""
        ahead = min(MOST_AHEAD, max(LEAST_AHEAD, used))
        if self._madvise is None or self._taken >= min(self._size, used + ahead // 2):
            return None
        begin, self._taken = self._taken, min(self._size, (used + ahead) // HUGE_PAGE * HUGE_PAGE)
        self._thread = self._thread or ThreadPoolExecutor(1, "kv-pages")
        return self._thread.submit(self._take, begin, self._taken)

    def _take(self, begin: int, end: int) -> None:
        assert self._madvise is not None
        for at in range(begin, end, AT_ONCE):
            length = min(AT_ONCE, end - at)
            if self._madvise(ctypes.c_void_p(self._address + at), ctypes.c_size_t(length), MADV_POPULATE_WRITE):
                log.debug("pages are taken when they are written: errno %d", ctypes.get_errno())
                return


def keep_freed_memory() -> None:
    """Have glibc keep what torch frees: else a long prompt's activations go back to the system, which zeroes them anew
    in every layer, 7 % of a prefill. One arena for all threads, as others would return theirs all the same."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_KEPT - 1)
        mallopt(M_ARENA_MAX, 1)
