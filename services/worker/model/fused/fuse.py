"""Fuses what can be fused in a loaded model: whole decoder layers of the usual make, and the parts of all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcpu.fused.modules import Rotary
from kvcpu.linear.packed import Multiplier
from kvfleet.worker.model.fused.decoder_layers import LayerFuser
from kvfleet.worker.model.fused.small_parts import SmallParts


def fuse(model: Any, multiplier: Multiplier, run: Callable[[], object]) -> dict[str, int]:
    """Replace in place, before linear layers are packed; returns how many of each kind were.

    `run` calls the model on a few tokens, at positions that matter, to see how it calls its layers.
    """
    rotary = Rotary(multiplier.threads)
    small = SmallParts(multiplier, rotary)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = LayerFuser(model, multiplier, rotary, run)
        usual = layers.usual(lambda copied: SmallParts(multiplier, rotary).fuse(copied))
        small.fuse(model)
        whole = sum(layers.replace(name, *attention) for name, attention in usual.items())
        layers.chain()
    return {"layers": whole, **small.done}
