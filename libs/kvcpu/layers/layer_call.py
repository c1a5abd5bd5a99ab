"""The call block of a product, a norm or a rotation, as one array of integers, and the sizes kernels work in. Pure."""

PANEL = 32  # output columns that lie together in a packed weight: two vectors

# What becomes of a product before it is written: nothing, act(gate) * product, or act(product); act is SiLU or GELU's
# tanh form.
PLAIN, SILU_GATE, TANH_GATE, SILU, TANH = range(5)

ROWS_AT_ONCE = 64  # of x whose sums are kept in a thread's scratch memory
DEPTH_AT_ONCE = 1024  # numbers of a row between two visits of the sums
SCRATCH_FLOATS = ROWS_AT_ONCE * 2 * PANEL
ROWS_PER_TICKET = 16  # of a norm, or tokens of a rotation

# Fields that all have, then those of one operation.
(
    SELF, SEAT, TICKET,  # its own address, for the two counters that threads share
    ROWS,  # of x; tokens of a rotation
    KIND,
    X, X_BYTES,  # from row to row; of a rotation X is the first of two tensors, which are turned in place
    OUT,
    WEIGHT,  # packed; floats of a norm
    BIAS,  # address of floats; of a product 0: none
    SCRATCH, SCRATCH_BYTES,  # per thread
    OWN,
) = range(13)  # fmt: skip

COLUMNS, DEPTH, OUT_BYTES, ACT, PANELS_PER_ITEM, ROWS_PER_ITEM = range(OWN, OWN + 6)
RESIDUAL = OWN + 6  # address of what is added to the result, laid out like it, 0: none

SIZE = OWN  # of a norm's row, or of a head
EPSILON, CENTERED = range(OWN + 1, OWN + 3)  # address of a float; 1: the mean is taken off (LayerNorm)

HEADS, TOKEN_STRIDE, HEAD_STRIDE, OTHER, OTHER_HEADS, OTHER_TOKEN_STRIDE, OTHER_HEAD_STRIDE = range(OWN + 1, OWN + 8)
COSINES, SINES, FIELDS = range(OWN + 8, OWN + 11)
