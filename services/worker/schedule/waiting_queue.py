"""The waiting sequences by (priority, tenant), the order of service over them, and prompt leaders. Pure.

A group is served in order of arrival, but sequences with a deadline swap places so that the earliest deadline goes
first. Between groups the order changes within a step, as tenants are charged:

    level, then the tenant served least, then prompts already begun, then arrival
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import attrgetter

from kvfleet.worker.blocks.block_pool import Match
from kvfleet.worker.schedule.sequence import Sequence, SequenceState, level_of

_arrival = attrgetter("arrival")
_deadline = attrgetter("spec.deadline", "arrival")

Key = tuple[int, int, bool, int]


class Group:
    """Of one (priority, tenant). Sequences with a deadline share `places`, by arrival."""

    def __init__(self) -> None:
        self.plain: list[Sequence] = []  # by arrival
        self.dated: list[Sequence] = []  # by deadline
        self.places: list[int] = []

    def __len__(self) -> int:
        return len(self.plain) + len(self.dated)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of service, lazily. Sequences may leave meanwhile."""
        plain_after, dated_after = -1, (float("-inf"), -1)
        while True:
            at = bisect_right(self.plain, plain_after, key=_arrival)
            dated_at = bisect_right(self.dated, dated_after, key=_deadline)
            plain = self.plain[at] if at < len(self.plain) else None
            if dated_at < len(self.dated) and (plain is None or self.places[dated_at] < plain.arrival):
                dated = self.dated[dated_at]
                dated_after = _deadline(dated)
                yield dated
            elif plain is not None:
                plain_after = plain.arrival
                yield plain
            else:
                return

    def add(self, sequence: Sequence) -> None:
        if sequence.spec.deadline is None:
            insort(self.plain, sequence, key=_arrival)
        else:
            insort(self.dated, sequence, key=_deadline)
            insort(self.places, sequence.arrival)

    def remove(self, sequence: Sequence) -> None:
        """The place goes too: the next by deadline has the next place."""
        dated = sequence.spec.deadline is not None
        queue, key = (self.dated, _deadline) if dated else (self.plain, _arrival)
        at = bisect_left(queue, key(sequence), key=key)
        assert queue[at] is sequence
        del queue[at]
        if dated:
            del self.places[at]


class WaitingQueue:
    """Owned by the scheduler."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], Group] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._groups.values())

    def add(self, sequence: Sequence) -> None:
        self._groups.setdefault(_group_of(sequence), Group()).add(sequence)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        key = _group_of(sequence)
        self._groups[key].remove(sequence)
        self._count -= 1
        if not self._groups[key]:
            del self._groups[key]

    @property
    def highest_priority(self) -> int:
        return max(priority for priority, _ in self._groups)

    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def check_integrity(self) -> None:
        assert self._count == sum(map(len, self._groups.values()))
        for key, group in self._groups.items():
            assert group
            assert all(_group_of(one) == key and one.state is SequenceState.WAITING for one in group)
            assert group.plain == sorted(group.plain, key=_arrival)
            assert group.dated == sorted(group.dated, key=_deadline)
            assert group.places == sorted(group.places)
            assert len(group.places) == len(group.dated)


class ServiceOrder:
    """One step's candidates for prompt tokens, best first. Keys only get worse while a step is planned, as counters
    only grow: so only the candidate on top is checked again."""

    def __init__(self, begun: Iterable[Sequence], waiting: Iterable[Iterable[Sequence]], now: float) -> None:
        self._now = now
        self._heap: list[tuple[Key, Sequence, Iterator[Sequence]]] = []
        for members in chain(((sequence,) for sequence in begun), waiting):
            rest = iter(members)
            first = next(rest)
            self._heap.append((self._key(first), first, rest))
        heapify(self._heap)

    def pop(self) -> Sequence | None:
        while self._heap:
            key, sequence, rest = heappop(self._heap)
            if (current := self._key(sequence)) != key:
                heappush(self._heap, (current, sequence, rest))
                continue
            if (following := next(rest, None)) is not None:
                heappush(self._heap, (self._key(following), following, rest))
            return sequence
        return None

    def drop_waiting(self) -> None:
        self._heap = [candidate for candidate in self._heap if candidate[1].state is not SequenceState.WAITING]
        heapify(self._heap)

    def _key(self, sequence: Sequence) -> Key:
        spec = sequence.spec
        level = level_of(spec.priority, self._now - sequence.enqueued)
        return -level, sequence.share.served, sequence.state is SequenceState.WAITING, sequence.arrival


class PromptLeaders:
    """Keeps sequences from computing the same prefix at the same time; lives for a step.

    A sequence gives its turn to the running one that is at its next block, its leader. So a request of high priority
    never waits for one that is not served. Choices of one prompt follow the first of them to the prompt's last token,
    other sequences follow by the hash of the next full block, or of the next of every `step` from which on more than K
    and V can be reused.
    """

    def __init__(self, begun: Iterable[Sequence], block_size: int, step: int = 1) -> None:
        self._block_size, self._step = block_size, step
        self._at_block: dict[bytes, Sequence] = {}
        for sequence in begun:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        if (at := self._next(sequence.filled)) < len(sequence.hashes):
            self._at_block.setdefault(sequence.hashes[at], sequence)

    def _next(self, full: int) -> int:
        return (full // self._step + 1) * self._step - 1

    def known(self, sequence: Sequence) -> Sequence | None:
        """The leader of an earlier step, while it still leads."""
        leader = sequence.leader
        if leader is not None and leader.state is SequenceState.RUNNING and leader.computed < sequence.shared:
            return leader
        sequence.leader = None
        return None

    def find(self, sequence: Sequence, match: Match) -> Sequence | None:
        """A leader for what is not cached of a waiting sequence; noted in the sequence."""
        limit = len(sequence.ids) - 1  # the last token is run by each itself, for its logits
        if match.tokens == limit:
            return None
        for sibling in sequence.siblings:
            if sibling.state is SequenceState.RUNNING:
                shared = min(sequence.agrees_with(sibling), limit)
                if max(sibling.computed, match.tokens) < shared:
                    sequence.leader, sequence.shared = sibling, shared
                    return sibling
                break  # it has all that can be had from a sibling
        at = self._next(len(match.blocks))
        leader = self._at_block.get(sequence.hashes[at]) if at < len(sequence.hashes) else None
        if leader is not None:
            sequence.leader, sequence.shared = leader, min((at + 1) * self._block_size, limit)
        return leader


def _group_of(sequence: Sequence) -> tuple[int, str]:
    return sequence.spec.priority, sequence.spec.tenant
