"""Which restored blocks vLLM computes again, and whether they come out the same. Owned by the worker's event loop.

A checksum says that bytes are those that were stored, not that they were right. So the last block of a sampled restore
is not brought: vLLM computes it on the blocks that were, and saves it beside the one that is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np

SAMPLED = 32  # one restore in so many
MOST_OPEN = 64
ROUNDING = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}  # between batches, relative to the largest number


@dataclass(frozen=True, slots=True)
class SampledRestore:
    """`first`: hash of the first block that came with it, from the vault `source` or, if that is "", from the host."""

    root: bytes
    first: bytes
    source: str


@dataclass(eq=False, slots=True)
class RestoreChecks:
    """`dtype`: of the cached numbers, as vLLM names it. Those of other types than ROUNDING's are not checked."""

    dtype: str
    sampled: int = SAMPLED
    _restores: count[int] = field(default_factory=lambda: count(1))
    _open: dict[bytes, SampledRestore] = field(default_factory=dict)

    def is_due(self) -> bool:
        """Asked once for each restore."""
        return self.dtype in ROUNDING and next(self._restores) % self.sampled == 0

    def expect(self, block: bytes, restore: SampledRestore) -> None:
        self._open[block] = restore
        while len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def take(self, block: bytes) -> SampledRestore | None:
        """What is to be checked now that this block was computed."""
        return self._open.pop(block, None)

    def difference(self, ours: memoryview, computed: memoryview) -> float:
        """Relative to the largest number."""
        one, other = _numbers(ours, self.dtype), _numbers(computed, self.dtype)
        return float(np.abs(one - other).max() / max(float(np.abs(other).max()), 1e-30))

    def is_wrong(self, difference: float) -> bool:
        return not difference <= ROUNDING[self.dtype]  # NaN is


def _numbers(block: memoryview, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    if dtype == "bfloat16":
        return (np.frombuffer(block, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(block, dtype).astype(np.float32)
