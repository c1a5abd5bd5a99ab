"""torch's names of the numbers that kernels know."""

from __future__ import annotations

import torch

from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32

STORED = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
MULTIPLIED = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # by products and fused operations
