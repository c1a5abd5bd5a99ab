"""When traced sequences draw their first token. The engine's thread owns it."""

from __future__ import annotations

from kvfleet.worker.schedule.sequence import Sequence, SequenceState


class TracedDraws:
    """`steps` counts those that drew a token."""

    def __init__(self) -> None:
        self.steps = 0
        self.undrawn: list[Sequence] = []  # that have started and drawn nothing yet

    def started(self, sequence: Sequence, now: float) -> None:
        assert sequence.spec.trace is not None
        sequence.spec.trace.admitted = now
        self.undrawn.append(sequence)

    def left(self, sequence: Sequence, now: float) -> None:
        assert sequence.spec.trace is not None
        self.note(now)
        sequence.spec.trace.leaves(now, self.steps, sequence.num_outputs - len(sequence.spec.output_ids))

    def note(self, now: float) -> None:
        """Of those that have drawn a first token, or are gone."""
        undrawn, self.undrawn = self.undrawn, []
        for sequence in undrawn:
            assert sequence.spec.trace is not None
            if sequence.num_outputs > len(sequence.spec.output_ids):
                sequence.spec.trace.drawn(now, self.steps)
            elif sequence.state is not SequenceState.FINISHED:
                self.undrawn.append(sequence)
