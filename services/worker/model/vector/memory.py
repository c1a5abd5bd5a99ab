"""Large pieces of host memory for what is read from end to end in every step: weights and KV."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 * 1024 * 1024
LARGEST_KEPT = 1 << 30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # <malloc.h>


def huge_pages(size: int) -> Tensor:
    """`size` zero bytes, `[size]` uint8, on huge pages where the system has them (4-KiB pages cost a fifth of the read
    rate). Nothing is taken before it is touched. Raises MemoryError if there is no room for it.
    """
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, dtype=np.uint8)
    skipped = -whole.ctypes.data % HUGE_PAGE  # a huge page begins at a multiple of its size
    return torch.from_numpy(whole[skipped : skipped + size])


def keep_freed_memory() -> None:
    """Have the C library keep what torch frees for what it allocates next, where it can be told to (glibc).

    Else the activations of a long prompt, megabytes each, are returned to the system and zeroed by it anew in every
    layer: 7 % of a prefill. One arena for all threads, because others would return theirs all the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_KEPT - 1)
        mallopt(M_ARENA_MAX, 1)
