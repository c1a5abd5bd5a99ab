"""The call blocks of norms and rotations, as arrays of integers. Pure; the layout kernels read by index."""

from __future__ import annotations

ROWS_AT_ONCE = 16  # rows, or tokens, that a thread takes per ticket

# Of a norm: rows of SIZE numbers.
(
    SELF,
    SEAT,
    TICKET,
    ROWS,
    SIZE,
    KIND,
    X,
    X_BYTES,  # from row to row
    OUT,
    WEIGHT,  # floats
    BIAS,  # floats
    EPSILON,  # address of a float
    CENTERED,  # 1: the mean is taken off (LayerNorm)
    SCRATCH,
    SCRATCH_BYTES,
    NORM_FIELDS,
) = range(16)

# Of a rotation: tokens with HEADS heads of SIZE numbers, in place; up to KIND as above, X is the first of two tensors.
HEADS, TOKEN_STRIDE, HEAD_STRIDE, OTHER, OTHER_HEADS, OTHER_TOKEN_STRIDE, OTHER_HEAD_STRIDE, COSINES, SINES = range(
    7, 16
)
ROTATION_SCRATCH, ROTATION_SCRATCH_BYTES, ROTATION_FIELDS = range(16, 19)
