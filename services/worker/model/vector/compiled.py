"""Python functions to C functions that threads outside of Python can run. Adapter to Numba's compiler.

Compiling takes seconds, so the result is kept on disk, by `kvservice.kernel_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numba
from numba import cfunc, types

from kvservice.kernel_cache import results_folder

SOURCES = Path(__file__).parents[2]
KERNELS = (  # folders whose code is compiled
    "model/vector",
    "model/linear",
    "model/fused",
    "model/sampling",
    "model/attention/cpu",
    "tiers/codecs",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A C function `void f(int64_t *call_block)`, which lives as long as this."""

    address: int
    keep: object


def entry(function: Callable[[object], None]) -> Entry:
    """Compile, or load what an earlier process compiled. `function` takes the address of a call block."""
    callback = cfunc(types.void(types.voidptr), cache=_keep_results())(function)
    return Entry(callback.address, callback)


@cache
def _keep_results() -> bool:
    """Point Numba's cache at a folder for this very source code; whether there is one."""
    folder = results_folder(path for folder in KERNELS for path in (SOURCES / folder).glob("*.py"))
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    return folder is not None
