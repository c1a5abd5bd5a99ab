"""Large pieces of host memory for what is read from end to end in every step: weights and KV."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 * 1024 * 1024


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
