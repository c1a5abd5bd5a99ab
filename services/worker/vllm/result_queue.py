"""What an engine on the loop's thread hands over: all that comes in one round of the loop together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvfleet.worker.port.outputs import SequenceOutput, StepResult
from kvproto.errors import EngineFailure
from kvproto.messages import TierEvents

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class ResultQueue:
    on_result: Callable[[list[StepResult]], None]
    is_over: bool = False
    _outputs: list[SequenceOutput] = field(default_factory=list)
    _changes: list[TierEvents] = field(default_factory=list)
    _flush_due: bool = False

    def tell(self, output: SequenceOutput) -> None:
        self._outputs.append(output)
        self._flush_soon()

    def changed(self, changes: Sequence[TierEvents]) -> None:
        self._changes += changes
        self._flush_soon()

    def answer(self, value: T) -> asyncio.Future[T]:
        """After all results that were there before it; EngineFailure once the engine was stopped."""
        self.flush()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self.is_over:
            future.set_exception(EngineFailure("the engine was stopped"))
        else:
            future.set_result(value)
        return future

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._flush_due = False
        if self._outputs or self._changes:
            result = StepResult(self._outputs, self._changes, sequences=bool(self._outputs))
            self._outputs, self._changes = [], []
            self.on_result([result])
