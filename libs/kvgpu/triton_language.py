"""Triton, which needs no GPU here: without one its interpreter runs the kernels on the CPU, as tests and dry runs do.

Import `triton` and `tl` from here alone. Whether kernels are interpreted is decided when Triton is first imported, by
whomever: where that may be earlier, TRITON_INTERPRET=1 must be set from the start.
"""

from __future__ import annotations

import os

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402 - it reads the variable
import triton.language as tl  # noqa: E402

__all__ = ["INTERPRETED", "tl", "triton"]
