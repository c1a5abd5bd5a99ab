"""The call block, which tells a kernel everything, as one array of integers that it reads by index. Pure.

Strides count elements, tables are rows of int64. The file also has the sizes of the pieces that kernels work on.
"""

from __future__ import annotations

from kvcpu.vector.numbers import LANES

STORED_AT_ONCE = 16  # tokens a thread stores per ticket
DECODE_CHUNK = 64  # tokens whose scores a decode keeps at a time: few, so that K and V are read nearly as they lie
DECODE_BYTES = 256 * 1024  # of K in a chunk at most, over all heads of an item: K and V stay in the cache of a core
PREFILL_CHUNK = 128
SPREAD = 4  # heads that share K and V from which on so much is computed that requests for memory are spread over it

# Fields of the call block: of the step and the pool, then of the layer, then its tensors.
(
    SELF,  # its own address, for the counters that threads share, zero before a call
    STORE_SEAT, STORE_TICKET, SEAT, TICKET, COMBINE_TICKET,  # a program runs the functions without anyone in between
    TOKENS,  # of the step, flat
    ITEMS, ITEM_TABLE, SLICES, SPLITS, SPLIT_TABLE, PARTIALS,
    SPAN,  # kv heads of a decode item; fewer where it is the last
    TABLES,  # block tables of all slices, one after the other
    SLOTS,  # [T], where each token is stored
    SCRATCH, SCRATCH_BYTES,  # per thread
    POOL,
    RUN_BYTES,  # of one run: K or V of one block, layer and head
    LAYERS, KV_KIND, BLOCK_SIZE,
    BLOCK_SHIFT,  # its logarithm, or -1 where it is no power of two
    TILED,  # 1: a tile of LANES tokens never crosses blocks
    DIRECT,  # 1: the pool's rows are what the kernels compute with
    PAIRS,  # 1: bfloat16 is multiplied as such, in pairs
    HEADS, KV_HEADS, HEAD_DIM,
    PARTS,  # 2: K and V; 1: keys alone, whose first numbers are the values
    VALUE_DIM,
    GROUP,  # heads per kv head
    PADDED,  # head_dim, up to the next multiple of LANES
    LAYER,
    WINDOW,  # 0: none
    FLOATS,  # address of scaling and soft cap (0: none)
    SINKS,  # address of a float for each head, or 0
    QUERY, QUERY_TOKEN, QUERY_HEAD,
    QUERY_KIND,  # of query, key, value and result alike
    KEY, KEY_TOKEN, KEY_HEAD, VALUE, VALUE_TOKEN, VALUE_HEAD, OUT,
    FIELDS,
) = range(50)  # fmt: skip

# Columns of the item table.
DECODE, PREFILL = 0, 1
ITEM_KIND, ITEM_SLICE, ITEM_HEAD, ITEM_LOW, ITEM_HIGH, ITEM_PARTIAL, ITEM_FIELDS = range(7)

# Columns of the slice table.
SLICE_FIRST, SLICE_START, SLICE_TABLE, SLICE_FIELDS = range(4)

# Columns of the split table: flat token, first kv head of SPAN, first partial, partials.
SPLIT_FIELDS = 4


def record_floats(rows: int, padded: int) -> int:
    """Floats of a record: maxima, sums and accumulators of some rows, each of the three beginning a cache line."""
    return 2 * whole_lines(rows) + rows * padded


def whole_lines(count: int) -> int:
    """Floats, up to whole cache lines."""
    return -(-count // LANES) * LANES
