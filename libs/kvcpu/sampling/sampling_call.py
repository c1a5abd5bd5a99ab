"""What the draws' kernels are called with: an array of int64; and the numbers that weights are made of."""

import math

# 2**f for |f| <= 1/2, highest power first: Taylor's, whose remainder is below a float64's precision there.
POWERS_OF_2 = tuple(math.log(2) ** power / math.factorial(power) for power in range(13, -1, -1))
MANTISSA_BITS = 52
DEEPEST = -200.0  # weights are 0 long before; keeps z finite

# Fields of a call block. Arrays have one entry a row unless said otherwise.
(
    SELF, TICKET,  # its own address, for the counter that threads share
    ROWS, VOCAB,
    LOGITS,  # float32 [rows, vocab], the largest of each row finite
    BITS,  # of a weight, the number itself
    SCALE,  # float64; for `masses` one for all rows
    TOP_K, TOP_P, LEAST, POINTS,
    TOKENS,  # int64, drawn
    MASSES,  # int64, the sum of each row's weights
    COUNT, BEST,  # int64 [rows, count], ids of the largest logits
    FIELDS,
) = range(16)  # fmt: skip
