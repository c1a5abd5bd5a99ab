"""How numbers are stored, as kernels and those who call them name it. Pure; imports no compiler."""

LANES = 16  # of a vector of floats: one AVX-512 register, two of AVX2, four of NEON

FLOAT32, BFLOAT16, FLOAT16, INT8 = range(4)
ITEM_BYTES = (4, 2, 2, 1)
SCALE_BYTES = 4  # of the float that a row of int8 is multiplied with
LEVELS = 127.0  # of int8, on either side of zero
