"""What steps did to the worker's blocks, as events. Pure; one owner per worker: the loop.

    a step ran ──▶ one event at once                          (what waited leaves with it)
    nothing ran ──▶ changes wait ──`due`──▶ one event         (no sooner than 50 ms after the last)

A step that ran nothing costs next to nothing (all it scheduled failed, say), so there may be thousands in a second:
without the wait each could be a message.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvfleet.worker.engine.outputs import StepResult
from kvproto.messages import BlockRun, KvEvents, Tier, TierEvents
from kvservice.event_log import IDLE_PERIOD_S, EventLog


class KvPublisher(EventLog):
    def batch(self, results: Iterable[StepResult], now: float, *, hold: bool = True) -> KvEvents | None:
        """One event for what the steps changed, in their order; None if that is nothing, or if it waits.

        `hold` False: nothing waits, so every digest the engine may name has an event.
        """
        ran = False
        for result in results:
            ran = ran or result.sequences > 0
            if result.removed:
                self.note((TierEvents(Tier.DEVICE, True, (BlockRun(b"", tuple(result.removed)),)),))
            if result.stored:
                runs = tuple(BlockRun(parent, tuple(hashes)) for parent, hashes in result.stored)
                self.note((TierEvents(Tier.DEVICE, False, runs),))
            self.note(result.below)
        if ran or not hold or now >= self._last_at + IDLE_PERIOD_S:
            return self.flush(now)
        return None
