"""How long a GPU is busy with a step, by its own events: the host's clock would count what the host does beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StepTimer:
    """`events` makes an event that can be timed; None where nothing is measured."""

    def __init__(self, events: Callable[[], Any] | None = None) -> None:
        self._events = events
        self._begun: Any = None
        self._passes: dict[Any, Any] = {}  # by the event that begins it

    def begin(self) -> None:
        """What is launched from here on is one pass."""
        if self._events is not None:
            self._begun = self._events()
            self._begun.record()

    def end(self) -> None:
        """All of the pass is launched, or more of it. One that never gets here is not timed."""
        if self._events is not None:
            ended = self._passes[self._begun] = self._events()
            ended.record()

    def take(self) -> float | None:
        """Seconds of the passes since the last time; None if there were none."""
        passes, self._passes = self._passes, {}
        for ended in passes.values():
            ended.synchronize()
        return sum(float(begun.elapsed_time(ended)) for begun, ended in passes.items()) / 1000 if passes else None


def timer_of(device: torch.device) -> StepTimer:
    if device.type != "cuda":
        return StepTimer()
    return StepTimer(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
