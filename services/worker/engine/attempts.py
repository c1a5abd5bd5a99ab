"""The sequences that live, by request, attempt and choice. Pure. The engine's thread owns it."""

from __future__ import annotations

from collections.abc import Iterator

from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import Key, Sequence, SequenceSpec, SequenceState
from kvproto.errors import InvalidRequest


class Attempts:
    def __init__(self) -> None:
        self._sequences: dict[Key, Sequence] = {}
        self._choices: dict[tuple[str, int], list[Sequence]] = {}  # of each attempt, those that live
        self._counted: set[tuple[str, int]] = set()  # attempts of which a choice has started

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def siblings(self, spec: SequenceSpec) -> list[Sequence]:
        """The choices of its attempt that live, which it is to join. Raises InvalidRequest if it is one of them."""
        if (spec.request, spec.attempt, spec.choice) in self._sequences:
            raise InvalidRequest("this attempt is running already", field="request")
        return self._choices.get((spec.request, spec.attempt), [])

    def add(self, sequence: Sequence) -> None:
        request, attempt, _ = sequence.key
        self._sequences[sequence.key] = sequence
        self._choices[request, attempt] = sequence.siblings
        sequence.siblings.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        request, attempt, _ = sequence.key
        del self._sequences[sequence.key]
        sequence.siblings.remove(sequence)
        if not sequence.siblings:
            del self._choices[request, attempt]
            self._counted.discard((request, attempt))

    def clear(self) -> list[Key]:
        """Forget all. Returns which they were."""
        keys = list(self._sequences)
        self._sequences, self._choices = {}, {}
        return keys

    def find(self, request: str, attempt: int | None) -> list[Sequence]:
        """All choices of an attempt, or of all attempts."""
        if attempt is not None:
            return list(self._choices.get((request, attempt), ()))
        return [sequence for key, sequence in self._sequences.items() if key[0] == request]

    def starts(self, sequence: Sequence) -> bool:
        """Whether no choice of its attempt has started before this one."""
        request, attempt, _ = sequence.key
        is_first = (request, attempt) not in self._counted
        self._counted.add((request, attempt))
        return is_first

    def check_integrity(self, scheduler: Scheduler) -> None:
        """Raises AssertionError if the scheduler has others than these."""
        queued = {s.key for s in (*scheduler.waiting, *scheduler.running)}
        queued |= {key for key, s in self._sequences.items() if s.state is SequenceState.RESTORING}
        paused = {key for key, s in self._sequences.items() if s.state is SequenceState.PAUSED}
        assert queued | paused == set(self._sequences)
        assert all(s in s.siblings and self._choices[s.key[:2]] is s.siblings for s in self)
        assert sum(map(len, self._choices.values())) == len(self._sequences)
