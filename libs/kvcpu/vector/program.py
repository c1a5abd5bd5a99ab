"""Compiled operations one after the other in one call: a team of threads runs each, and waits for all before the next.

A step of few tokens makes some hundred small operations; called from Python each would cost as much as it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcpu.vector import team
from kvcpu.vector.compiled import CompiledEntry, entry

# Fields of the call block; the table has two columns: address of the function, address of its call block.
COUNT, TABLE, BARRIER, FIELDS = range(4)


class Program:
    """`operations`: functions and the addresses of their call blocks, which the caller keeps and may change."""

    def __init__(self, operations: Sequence[tuple[CompiledEntry, int]], threads: int) -> None:
        self._entry = entry("kvcpu.vector.cells", "run_all")
        self._threads = threads if team.barrier() else 1
        self._table = np.array([(one.address, block) for one, block in operations], dtype=np.int64)
        barrier = team.barrier() if self._threads > 1 else 0
        self._block = np.array([len(operations), self._table.ctypes.data, barrier], dtype=np.int64)
        self._address = self._block.ctypes.data

    def run(self) -> None:
        """The maker of the call blocks has set their counters to zero."""
        team.run(self._entry.address, self._address, self._threads)
