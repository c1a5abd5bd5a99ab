"""Makes a loaded model fast on a CPU: small operations fused, linear layers packed. Changes the model in place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from kvcpu.layers.modules import Rotary
from kvcpu.layers.packed import Multiplier, pack
from kvcpu.vector.memory import keep_freed_memory
from kvfleet.worker.model.fused.decoder_layers import LayerFuser
from kvfleet.worker.model.fused.small_parts import SmallParts

log = logging.getLogger(__name__)


def fuse(model: Any, multiplier: Multiplier, run: Callable[[], object]) -> dict[str, int]:
    """Replace whole decoder layers of the usual make, and the parts of all others, in place, before linear layers are
    packed; returns how many of each kind were.

    `run` calls the model on a few tokens, at positions that matter, to see how it calls its layers.
    """
    rotary = Rotary(multiplier.threads)
    small = SmallParts(multiplier, rotary)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = LayerFuser(model, multiplier, rotary, run)
        usual = layers.usual()
        small.fuse(model)
        whole = sum(layers.replace(name, *attention) for name, attention in usual.items())
        layers.chain()
    return {"layers": whole, **small.done}


def optimise(model: Any, threads: int, run: Callable[[], object]) -> None:
    """For a model that is called from one thread from now on; `run` calls it, at positions that matter
    (`trial_positions`). Blocks while weights are packed."""
    began = time.monotonic()
    keep_freed_memory()
    multiplier = Multiplier(threads)
    fused = fuse(model, multiplier, run)
    packed = pack(model, multiplier)
    log.info(
        "optimised for %d threads in %.1f s: %s, %d more linear layers packed",
        threads,
        time.monotonic() - began,
        ", ".join(f"{count} {kind}" for kind, count in fused.items()),
        packed,
    )
