"""Runs compiled functions on torch's own threads, one or several in a row. Adapter to torch's OpenMP runtime.

A second pool of threads would fight torch's for the cores, as both spin between the layers. So torch's own team runs
the function, through `GOMP_parallel`. Where torch has no OpenMP (macOS), the calling thread alone runs it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kvcpu.vector.compiled import CompiledEntry, entry

log = logging.getLogger(__name__)

# Fields of a program's call block; the table has two columns: address of the function, address of its call block.
COUNT, TABLE, BARRIER, FIELDS = range(4)

Fork = Callable[[int, int, int, int], None]  # (function, its argument, threads, flags)


def run(function: int, argument: int, threads: int) -> None:
    """Call the C function at address `function`, `void f(void *argument)`, once on each of `threads` threads."""
    fork = _fork() if threads > 1 else None
    if fork is None:
        _callable(function)(argument)
    else:
        fork(function, argument, threads, 0)


class Program:
    """Compiled operations in one call: the team runs each, and waits for all before the next. Called from Python, each
    of the hundred small operations of a short step would cost as much as it computes. `operations`: functions and the
    addresses of their call blocks, which the caller keeps and may change."""

    def __init__(self, operations: Sequence[tuple[CompiledEntry, int]], threads: int) -> None:
        self._entry = entry("kvcpu.vector.cells", "run_all")
        self._threads = threads if barrier() else 1
        self._table = np.array([(one.address, block) for one, block in operations], dtype=np.int64)
        between = barrier() if self._threads > 1 else 0
        self._block = np.array([len(operations), self._table.ctypes.data, between], dtype=np.int64)
        self._address = self._block.ctypes.data

    def run(self) -> None:
        """The counters in the call blocks must be zero."""
        run(self._entry.address, self._address, self._threads)


@cache
def _callable(function: int) -> Callable[[int], None]:
    """Cached, as making one takes longer than a small norm."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


def barrier() -> int:
    """Address of the C function in which a thread of the team waits for all others; 0 where there is no team."""
    runtime = _runtime()
    return 0 if runtime is None else ctypes.cast(runtime.GOMP_barrier, ctypes.c_void_p).value or 0


@cache
def _fork() -> Fork | None:
    runtime = _runtime()
    if runtime is None:
        log.warning("torch's OpenMP runtime was not found: attention runs on one thread")
        return None
    entry = runtime.GOMP_parallel
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


@cache
def _runtime() -> ctypes.CDLL | None:
    for path in _openmp_libraries():
        try:
            library = ctypes.CDLL(str(path))
            if library.GOMP_parallel and library.GOMP_barrier:
                return library
        except (OSError, AttributeError):
            continue
    return None


def _openmp_libraries() -> list[Path]:
    """OpenMP runtimes in torch's folders, loaded ones first, under whatever name its build gave them."""
    folder = Path(torch.__file__).parent
    found = sorted(
        path
        for place in (folder / "lib", folder.parent / "torch.libs")
        if place.is_dir()
        for path in place.iterdir()
        if path.name.startswith(("libgomp", "libiomp5", "libomp"))
    )
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return found
    loaded = [Path(line.split(maxsplit=5)[5]) for line in mapped.splitlines() if "omp" in line.rpartition("/")[2]]
    return [path for path in dict.fromkeys([*found, *loaded]) if str(path) in mapped]
