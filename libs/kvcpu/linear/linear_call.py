"""The call block of a matrix product, as one array of integers. Pure; the layout kernels read by index."""

from __future__ import annotations

PANEL = 32  # output columns that lie together in a packed weight: two vectors

# What becomes of a product before it is written: nothing, act(gate) * product, or act(product); act is SiLU or GELU's
# tanh form.
PLAIN, SILU_GATE, TANH_GATE, SILU, TANH = range(5)

ROWS_AT_ONCE = 64  # of x whose sums are kept in a thread's scratch memory
DEPTH_AT_ONCE = 1024  # numbers of a row between two visits of the sums
SCRATCH_FLOATS = ROWS_AT_ONCE * 2 * PANEL

(
    SELF,  # its own address, for the two counters that threads share
    SEAT,
    TICKET,
    ROWS,  # of x
    COLUMNS,  # of the result
    DEPTH,  # of x and weight
    X,
    X_BYTES,  # from row to row
    WEIGHT,
    OUT,
    OUT_BYTES,
    KIND,
    BIAS,  # address of floats, 0: none
    ACT,
    PANELS_PER_ITEM,
    ROWS_PER_ITEM,
    SCRATCH,
    RESIDUAL,  # address of what is added to the result, laid out like it, 0: none
    FIELDS,
) = range(19)
