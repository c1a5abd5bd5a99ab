"""Makes a loaded model fast on a CPU: small operations fused, linear layers packed. Changes the model in place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvcpu.linear.packed import Multiplier, pack
from kvcpu.vector.memory import keep_freed_memory
from kvfleet.worker.model.fused.fuse import fuse

log = logging.getLogger(__name__)


def optimise(model: Any, threads: int, run: Callable[[], object]) -> None:
    """For a model that is called from one thread from now on; `run` calls it, at positions that matter (`positions`).
    Blocks while weights are packed."""
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
