"""Whether anybody still waits for the forward pass under way.

A cancel is obeyed between two steps, and a step with a long prompt takes a second. So the runner looks here
between any two layers, and gives the pass up once every sequence of it was cancelled. Nothing of it is committed then:
what it wrote lies behind the last computed token of its sequences, where nobody reads.

`ask` is for any thread; all else is for the one that runs steps, which alone compares: there is nothing to race for.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from kvfleet.worker.schedule.sequence import Sequence


class StepAborted(Exception):
    """All that the step was for is cancelled. Caught by the engine, seen by nobody else."""


class Abort:
    """Cancels that were asked for and not obeyed yet, and the sequences of the step under way."""

    def __init__(self) -> None:
        self._asked: set[tuple[str, int | None]] = set()
        self._sequences: Items[Sequence] = ()

    def ask(self, request: str, attempt: int | None) -> None:
        """An attempt, or all of a request, will be cancelled after this step."""
        self._asked.add((request, attempt))

    def obeyed(self, request: str, attempt: int | None) -> None:
        """It was."""
        self._asked.discard((request, attempt))

    def begin(self, sequences: Items[Sequence]) -> None:
        self._sequences = sequences

    def end(self) -> None:
        self._sequences = ()

    def check(self) -> None:
        """Raises StepAborted if nobody waits any more; costs next to nothing while no cancel is to be obeyed."""
        if self._asked and self._sequences and all(self._is_unwanted(one) for one in self._sequences):
            raise StepAborted

    def _is_unwanted(self, sequence: Sequence) -> bool:
        request, attempt = sequence.spec.request, sequence.spec.attempt
        return (request, attempt) in self._asked or (request, None) in self._asked
