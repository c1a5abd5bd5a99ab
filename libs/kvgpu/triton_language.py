"""Triton, which needs no GPU here: without one its interpreter runs the kernels on the CPU, as tests and dry runs do.

Import `triton` and `tl` from here alone. Whether kernels are interpreted is decided when Triton is first imported, by
whomever: where that may be earlier, TRITON_INTERPRET=1 must be set from the start.
"""

from __future__ import annotations

import os
from typing import Any

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402 - it reads the variable
import triton.language as tl  # noqa: E402

__all__ = ["INTERPRETED", "compiled", "tl", "triton"]

compiled: list[str] = []  # by this process, for those who show what it does


def _heard(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compiled.append(metadata["name"])


triton.knobs.compilation.listener = triton.knobs.compilation.listener or _heard
