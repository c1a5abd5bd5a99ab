"""What the draws' kernels are called with: an array of int64."""

from __future__ import annotations

# Fields of a call block. Arrays have one entry a row unless said otherwise.
(
    SELF,  # its own address, for the counter that threads share
    TICKET,
    ROWS,
    VOCAB,
    LOGITS,  # float32 [rows, vocab], the largest of each row finite
    BITS,  # of a weight, the number itself
    SCALE,  # float64; for `masses` one for all rows
    TOP_K,
    TOP_P,
    LEAST,
    POINTS,
    TOKENS,  # int64, drawn
    MASSES,  # int64, the sum of each row's weights
    COUNT,
    BEST,  # int64 [rows, count], ids of the largest logits
    FIELDS,
) = range(16)
