"""The devices that a test of tensor code runs on: the CPU, and a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")),
]


def finish(device: str) -> None:
    """Wait for what is queued on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
