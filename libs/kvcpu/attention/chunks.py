"""How much the kernels take at a time. Pure."""

from __future__ import annotations

from kvcpu.vector.numbers import LANES

DECODE_CHUNK = 64  # tokens whose scores a decode keeps at a time: few, so that K and V are read nearly as they lie
DECODE_BYTES = 256 * 1024  # of K in a chunk at most, over all heads of an item: K and V stay in the cache of a core
PREFILL_CHUNK = 128
SPREAD = 4  # heads that share K and V from which on so much is computed that requests for memory are spread over it


def record_floats(rows: int, padded: int) -> int:
    """Floats of a record: maxima, sums and accumulators of some rows, each of the three beginning a cache line."""
    return 2 * whole_lines(rows) + rows * padded


def whole_lines(count: int) -> int:
    """Floats, up to whole cache lines."""
    return -(-count // LANES) * LANES
