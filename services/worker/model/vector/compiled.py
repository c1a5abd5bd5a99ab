"""Python functions to C functions that threads outside of Python can run. Adapter to Numba's compiler and its cache.

Compiling takes seconds, so the result is kept on disk. Numba keys what it keeps by the file that a function stands in;
the inner loops that it calls stand in others, so the folder's name holds a hash over all of them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numba
from numba import cfunc, types

SOURCES = Path(__file__).parent.parent
KERNELS = ("vector", "linear", "fused", "sampling", "attention/cpu")  # folders whose code is compiled


@dataclass(frozen=True, slots=True)
class Entry:
    """A C function `void f(int64_t *call_block)`, which lives as long as this."""

    address: int
    keep: object


def entry(function: Callable[[object], None]) -> Entry:
    """Compile, or load what an earlier process compiled. `function` takes the address of a call block."""
    _keep_results()
    callback = cfunc(types.void(types.voidptr), cache=True)(function)
    return Entry(callback.address, callback)


@cache
def _keep_results() -> None:
    """Point Numba's cache, unless NUMBA_CACHE_DIR says where it is, at a folder for this very source code."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for folder in KERNELS for path in (SOURCES / folder).glob("*.py")):
        digest.update(path.read_bytes())
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "kvfleet" / f"kernels-{digest.hexdigest()}"
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # no home, or none that can be written: compiled anew each time
        writable = False
    numba.config.CACHE_DIR = str(folder) if writable else tempfile.mkdtemp(prefix="kvfleet-kernels-")
