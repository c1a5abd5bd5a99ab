"""Which worker has, or just had, each request, so that a repeated one is not done again. Pure.

    placed, here or by another replica ──5 s without a word──▶ forgotten
        │
        └──any milestone of any worker──▶ running ──its end──▶ ended ──30 s, while its worker can repeat it──▶ forgotten

Every replica hears all of this. A request that did not finish is done anew, as a later attempt.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvproto.messages import Milestone, Passed

PLACED_S = 5.0
ENDED_S = 30.0  # a worker keeps the frames of what finished for so long
MAX_KEPT = 65_536  # in each state

Key = tuple[str, str]  # tenant, request


@dataclass(slots=True)
class KnownRequest:
    """An attempt, at one life of a worker."""

    worker: str
    epoch: str
    attempt: int
    at: float = 0.0  # when it came into its present state
    is_there: bool = True  # the worker can repeat it


@dataclass(eq=False, slots=True)
class Repeats:
    """Owned by the core; `now` never goes back."""

    max_kept: int = MAX_KEPT
    now: float = 0.0
    placed: OrderedDict[Key, KnownRequest] = field(default_factory=OrderedDict)  # oldest first, as the others
    running: OrderedDict[Key, KnownRequest] = field(default_factory=OrderedDict)
    ended: OrderedDict[Key, KnownRequest] = field(default_factory=OrderedDict)
    at: dict[str, dict[Key, KnownRequest]] = field(default_factory=dict)  # by worker, while there; no empty entries

    def __len__(self) -> int:
        return len(self.placed) + len(self.running) + len(self.ended)

    def find(self, key: Key) -> KnownRequest | None:
        return self.placed.get(key) or self.running.get(key) or self.ended.get(key)

    def place(self, key: Key, worker: str, epoch: str, attempt: int, now: float) -> None:
        before = self.find(key)
        if before is None or attempt > before.attempt:
            self._put(self.placed, key, KnownRequest(worker, epoch, attempt), now)

    def give_up(self, key: Key, attempt: int) -> None:
        """No worker has it any more: it takes a later attempt."""
        known = self.placed.get(key) or self.running.get(key)
        if known is not None and known.attempt == attempt:
            self._put(self.ended, key, known, self.now, is_there=False)

    def on_milestone(self, worker: str, epoch: str, one: Milestone, now: float) -> None:
        key = one.tenant, one.request
        before = self.find(key)
        if before is not None and one.attempt < before.attempt:
            return  # a word of a former attempt
        known = before
        if known is None or (known.worker, known.epoch, known.attempt) != (worker, epoch, one.attempt):
            known = KnownRequest(worker, epoch, one.attempt)
        if one.passed is Passed.ENDED:
            self._put(self.ended, key, known, now, is_there=one.code is None)
        elif key not in self.running or before is not known:
            self._put(self.running, key, known, now)

    def has_finished(self, key: Key, attempt: int) -> bool:
        known = self.ended.get(key)
        return known is not None and known.attempt == attempt and known.is_there

    def drop_worker(self, worker: str) -> None:
        for key, known in list(self.at.get(worker, {}).items()):
            if key in self.ended:
                self._set_aside(key, known)  # its place in the table stays: the time of its end counts
            else:
                self._put(self.ended, key, known, self.now, is_there=False)

    def tick(self, now: float) -> None:
        self.now = now
        for table, limit in ((self.placed, PLACED_S), (self.ended, ENDED_S)):
            while table:
                key, known = next(iter(table.items()))
                if now - known.at <= limit:
                    break
                self._take_out(key)

    def _put(
        self, table: OrderedDict[Key, KnownRequest], key: Key, known: KnownRequest, now: float, *, is_there: bool = True
    ) -> None:
        self._take_out(key)
        known.at = self.now = max(now, self.now)
        known.is_there = is_there
        table[key] = known
        if is_there:
            self.at.setdefault(known.worker, {})[key] = known
        if len(table) > self.max_kept:
            self._take_out(next(iter(table)))

    def _take_out(self, key: Key) -> None:
        for table in (self.placed, self.running, self.ended):
            if (known := table.pop(key, None)) is not None:
                self._set_aside(key, known)

    def _set_aside(self, key: Key, known: KnownRequest) -> None:
        if known.is_there:
            known.is_there = False
            held = self.at[known.worker]
            del held[key]
            if not held:
                del self.at[known.worker]

    def check_integrity(self) -> None:
        tables = (self.placed, self.running, self.ended)
        assert len({key for table in tables for key in table}) == len(self)
        for table in tables:
            assert len(table) <= self.max_kept
            times = [known.at for known in table.values()]
            assert times == sorted(times)
        assert all(known.is_there for table in tables[:2] for known in table.values())
        assert all(self.at.values())
        listed = {key: worker for worker, held in self.at.items() for key in held}
        assert listed == {key: known.worker for table in tables for key, known in table.items() if known.is_there}
