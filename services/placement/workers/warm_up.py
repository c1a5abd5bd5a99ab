"""Compiles placement's kernels before the first request. Adapter to Numba's compiler and its cache.

The kernels' modules compile nothing on import and know no disk; here each gets its folder and is called once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from kvfleet.placement.index import entry_kernels, hash_kernel, query_kernels, reading
from kvfleet.placement.index.changes import read_changes
from kvfleet.placement.index.prefix_index import PrefixIndex, pack
from kvfleet.placement.workers import count_kernel, price_kernel, prompts
from kvfleet.placement.workers.inflight_blocks import BlockCounts
from kvfleet.placement.workers.prompts import chain
from kvfleet.placement.workers.workloads import PRICED_TIERS, Workloads
from kvproto import codec
from kvproto.messages import BlockRun, KvEvents, Tier, TierEvents
from kvservice.kernel_cache import results_folder

MODULES = (entry_kernels, query_kernels, reading, hash_kernel, price_kernel, prompts, count_kernel)
SOURCES = tuple(Path(str(one.__file__)) for one in MODULES)
KERNELS = tuple(one for module in MODULES for one in vars(module).values() if isinstance(one, Dispatcher))


@cache
def warm_up() -> None:
    """Compile, which takes seconds, or load what an earlier process compiled."""
    folder = results_folder(SOURCES)
    if folder is not None:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            for kernel in KERNELS:
                kernel.enable_caching()  # as `njit(cache=True)`, which would look for a folder on import
        finally:
            numba.config.CACHE_DIR = before  # the process may keep other kernels elsewhere
    _call_all()


def _call_all() -> None:
    """Read-only arrays, from a message's bytes, and our own are two types to Numba."""
    blocks = [bytes((number,)) * 16 for number in range(8)]
    event = KvEvents("", 1, (TierEvents(Tier.DEVICE, False, (BlockRun(b"", tuple(blocks)),)),))
    own = read_changes(codec.encode_events(event)).changes[0].hashes
    index = PrefixIndex(8)
    for hashes in (own, pack(blocks)):
        holder = index.add_holder()
        index.store(holder, 0, hashes)
        index.remove(holder, 0, hashes[4:])
        index.find(hashes)
        index.compact()
        index.retire(holder)
        index.clean(8)
        index.count_sole(index.mask_of([holder]), 0, 8, np.zeros(64, dtype=np.int64))
        index.sole_holders(hashes, index.mask_of([holder]))
        counts = BlockCounts()
        counts.add(hashes)
        counts.take(hashes)
        counts.grow()
    workloads = Workloads()
    idle = workloads.view(np.array([workloads.add(0.0, 1, 0.0)]), 0.0)
    matched = np.zeros((len(PRICED_TIERS), 1))
    groups = np.zeros(1, dtype=np.int64)
    price_kernel.fill(np.zeros((3, 1), dtype=np.int32), groups, np.ones(1), 0, 16.0, 0.0, matched, matched.copy())
    assert idle.waits().tolist() == [0.0]
    priced = idle.price(matched, 1, heat=0.0, others=0.0, busy=0.0)
    assert price_kernel.cheapest(priced, matched[-1], 1, False, 0.0, 0.0, np.empty(1, dtype=np.int64)) == (0, 1)
    assert len(chain(blocks[0], range(64), 16)) == 4
    assert not len(index)
    assert np.array_equal(own, pack(blocks))
