"""What a vLLM worker's vaults were sent, so that nothing is sent again. Owned by the worker's event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvproto.block_hash import state_after

MOST = 65_536
DOUBT_S = 10.0  # between two times that all is sent again, as vaults may refuse some of it each time


@dataclass(eq=False, slots=True)
class SentHashes:
    """Of blocks and recurrent states, the last ones."""

    _sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _losses: int = 0
    _doubted_at: float = float("-inf")

    def __contains__(self, one: bytes) -> bool:
        return one in self._sent

    def add(self, one: bytes) -> None:
        self._sent[one] = None
        if len(self._sent) > MOST:
            self._sent.popitem(last=False)

    def drop(self, one: bytes) -> None:
        self._sent.pop(one, None)

    def forget(self, blocks: Iterable[bytes]) -> None:
        """And the states at their ends."""
        for block in blocks:
            self.drop(block)
            self.drop(state_after(block))

    def lost(self, losses: int) -> None:
        """Vaults have lost something so many times: nobody knows what."""
        if losses != self._losses and time.monotonic() >= self._doubted_at + DOUBT_S:
            self._losses, self._doubted_at = losses, time.monotonic()
            self._sent.clear()
