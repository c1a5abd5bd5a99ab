"""Each worker's load, as columns of numbers: one decision looks at all workers at once. Pure.

A prefill backlog is a fluid: it drains at the worker's measured rate, bookings add to it, and each heartbeat corrects
it. So between two heartbeats a burst sees its own weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvfleet.placement.index.changes import TIERS
from kvfleet.placement.workers import price_kernel as kernel
from kvproto.messages import Load, PriorityLoad, Rates, Tier

Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = npt.NDArray[np.int64]

PRICED_TIERS = (*TIERS, Tier.PEER)  # rows of what is matched and of restore rates
FIRST_COLUMNS = 64
LEAST_RATE = 1e-3  # tokens/s: less is no measurement


@dataclass(slots=True)
class Levels:
    """Work by priority, 201 at most, as a fluid that is served from the top. Amounts are never negative."""

    amounts: dict[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.amounts.values())

    def add(self, priority: int, amount: float) -> None:
        """A negative amount takes away at most what is there."""
        left = self.amounts.get(priority, 0.0) + amount
        if left > 0:
            self.amounts[priority] = left
        else:
            self.amounts.pop(priority, None)

    def drain(self, amount: float) -> None:
        for priority in sorted(self.amounts, reverse=True):
            if amount <= 0:
                return
            taken = min(amount, self.amounts[priority])
            amount -= taken
            self.add(priority, -taken)

    def ahead(self, priority: int) -> float:
        """Of this priority and of higher ones."""
        return sum(amount for level, amount in self.amounts.items() if level >= priority)


@dataclass(eq=False, slots=True)
class View:
    """Some workers at one moment, a column each."""

    values: Floats
    now: float

    def price(
        self, matched: Floats, tokens: int, *, heat: float = 0.0, others: float = 0.0, busy: float = 0.0
    ) -> Floats:
        """`price_kernel.price` of a request of `tokens`, of which `matched` `[4, workers]` are cached: a row for each
        of `TERMS`, in seconds, and their sum; then the tokens restored from each tier."""
        out = np.empty((kernel.ROWS, self.values.shape[1]))
        kernel.price(self.values, matched, tokens, heat, self.now, others, busy, out)
        return out

    def waits(self) -> Floats:
        """Seconds until a request would be begun."""
        out = np.empty(self.values.shape[1])
        kernel.waits(self.values, self.now, out)
        return out

    def turn_s(self, tokens: int) -> float:
        """Seconds that all of them together are busy with one request of so many prompt tokens."""
        values = self.values
        rates = values[kernel.RATE][values[kernel.RATE] > 0]
        stays = values[kernel.STAY] / np.maximum(values[kernel.SLOTS], 1.0)
        prefill = tokens / float(rates.mean()) if len(rates) else 0.0
        return (prefill + float(stays.mean())) / max(len(stays), 1)

    @property
    def requests(self) -> Floats:
        requests: Floats = self.values[kernel.REQUESTS]
        return requests

    @property
    def usage(self) -> Floats:
        """The larger share: of slots, by all requests, or of KV blocks, by running sequences."""
        values = self.values
        slots = values[kernel.REQUESTS] / np.maximum(values[kernel.SLOTS], 1.0)
        larger: Floats = np.maximum(slots, values[kernel.BLOCKS_USED] / np.maximum(values[kernel.BLOCKS], 1.0))
        return larger


class Workloads:
    """Owned by the core. A column belongs to one life of one worker; `now` never goes back."""

    def __init__(self) -> None:
        self.now = 0.0  # the latest time heard of
        self._free = list(range(FIRST_COLUMNS - 1, -1, -1))
        self._values: Floats = np.zeros((kernel.LOAD_ROWS, FIRST_COLUMNS))
        self._levels: dict[int, tuple[Levels, Levels]] = {}  # backlog and requests, where not all is of priority 0

    def add(self, token_bytes: float, block_tokens: int, now: float) -> int:
        if not self._free:
            size = self._values.shape[1]
            self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
            self._free += range(2 * size - 1, size - 1, -1)
        column = self._free.pop()
        self._values[:, column] = 0.0
        self._values[kernel.AT, column] = now
        self._values[kernel.CREDIT, column] = 1.0
        self._values[kernel.TOKEN_BYTES, column] = token_bytes
        self._values[kernel.BLOCK_TOKENS, column] = block_tokens
        self._levels.pop(column, None)
        return column

    def weigh(self, column: int, token_bytes: float) -> None:
        self._values[kernel.TOKEN_BYTES, column] = token_bytes

    def drop(self, column: int) -> None:
        self._free.append(column)

    def report(self, column: int, load: Load, rates: Rates, unseen: Iterable[tuple[int, float]], now: float) -> None:
        """Take a heartbeat; `unseen` are booked requests that cannot be in it yet: priority, tokens."""
        values, unseen = self._values, list(unseen)
        self._drain(column, now)
        self._report_levels(column, load, unseen)
        rate = rates.prefill_tokens_per_s if rates.prefill_tokens_per_s >= LEAST_RATE else 0.0
        if rate != values[kernel.RATE, column]:
            values[kernel.RATE, column], values[kernel.RATE_AT, column] = rate, now
        values[kernel.BACKLOG, column] = load.queued_prefill_tokens + sum(tokens for _, tokens in unseen)
        values[kernel.REQUESTS, column] = load.waiting + load.running + len(unseen)
        values[kernel.SLOTS, column] = _seats(load)
        if rates.decode_tokens_per_s >= LEAST_RATE:
            values[kernel.TOKEN_S, column] = 1 / rates.decode_tokens_per_s
        if rates.decode_steps_per_s >= LEAST_RATE:
            values[kernel.STEP_S, column] = 1 / rates.decode_steps_per_s
        values[kernel.BLOCKS_USED, column] = load.blocks_used
        values[kernel.BLOCKS, column] = load.blocks_total
        for tier, rate in rates.restore_bytes_per_s.items():
            if tier in _RESTORE_ROW and math.isfinite(rate) and rate >= 0:
                values[_RESTORE_ROW[tier], column] = rate

    def give(self, column: int, tokens: float, now: float, *, priority: int = 0) -> None:
        """Add a request with so many tokens to prefill."""
        self._drain(column, now)
        if priority or column in self._levels:
            if column not in self._levels:  # until now all was of priority 0
                before = self._values[[kernel.BACKLOG, kernel.REQUESTS], column].tolist()
                self._levels[column] = Levels({0: before[0]}), Levels({0: before[1]})
            backlog, requests = self._levels[column]
            backlog.add(priority, tokens)
            requests.add(priority, 1)
        self._values[kernel.REQUESTS, column] += 1
        self._values[kernel.BACKLOG, column] += tokens
        self._values[kernel.RECENT, column] += tokens

    def correct(self, column: int, tokens: float, now: float, *, queued: bool = True, priority: int = 0) -> None:
        """A request has so many more tokens to prefill. Not `queued`: the worker's own figure has that."""
        self._drain(column, now)
        if queued and column in self._levels:
            self._levels[column][0].add(priority, tokens)
        for row in (kernel.BACKLOG, kernel.RECENT) if queued else (kernel.RECENT,):
            self._values[row, column] = max(0.0, self._values[row, column] + tokens)

    def take(self, column: int, tokens: float, now: float, *, queued: bool = True, priority: int = 0) -> None:
        """A request is gone, and so many of its tokens will never be prefilled."""
        self.correct(column, -tokens, now, queued=queued, priority=priority)
        if column in self._levels:
            self._levels[column][1].add(priority, -1)
        self._values[kernel.REQUESTS, column] = max(0.0, self._values[kernel.REQUESTS, column] - 1)

    def learn(self, row: int, column: int, value: float) -> None:
        """A request left after so many seconds (STAY), or tokens (OUTPUT): their mean follows slowly."""
        old = self._values[row, column]
        self._values[row, column] = old + (value - old) * 0.1 if old else value

    def trust(self, column: int, credit: float) -> None:
        """Believe this share of the worker's indexed blocks."""
        self._values[kernel.CREDIT, column] = credit

    def view(self, columns: Columns, now: float, *, priority: int = 0) -> View:
        """These workers as a request of this priority finds them now."""
        values = self._values.take(columns, axis=1)
        if priority <= 0:  # else nothing is ahead, unless levels say so
            values[kernel.AHEAD], values[kernel.AHEAD_REQUESTS] = values[kernel.BACKLOG], values[kernel.REQUESTS]
        for number, column in enumerate(columns.tolist() if self._levels else ()):
            if column in self._levels:
                backlog, requests = (levels.ahead(priority) for levels in self._levels[column])
                values[kernel.AHEAD, number] = min(values[kernel.BACKLOG, number], backlog)
                values[kernel.AHEAD_REQUESTS, number] = min(values[kernel.REQUESTS, number], requests)
        return View(values, now)

    def rates_like(self, view: View, others: Columns) -> None:
        """Where a worker of the view has measured no rate of prefill, that of `others` stands for it."""
        rates = self._values[kernel.RATE].take(others)
        if (measured := rates[rates > 0]).size:
            missing = view.values[kernel.RATE] <= 0
            view.values[kernel.RATE, missing] = measured.size / (1 / measured).sum()

    def credits_of(self, columns: Columns) -> Floats:
        credits: Floats = self._values[kernel.CREDIT].take(columns)
        return credits

    def requests_of(self, columns: Columns) -> Floats:
        requests: Floats = self._values[kernel.REQUESTS].take(columns)
        return requests

    def rate_of(self, column: int) -> float:
        """Prefill tokens/s; 0: not measured."""
        return float(self._values[kernel.RATE, column])

    def _drain(self, column: int, now: float) -> None:
        values = self._values
        now = max(now, self.now)  # milestones that came before their booking have an earlier time
        waited = now - values[kernel.AT, column]
        values[kernel.AT, column] = self.now = now
        rate = values[kernel.RATE, column] or kernel.UNMEASURED_RATE
        values[kernel.BACKLOG, column] = max(0.0, values[kernel.BACKLOG, column] - waited * rate)
        if column in self._levels:
            self._levels[column][0].drain(waited * rate)
        values[kernel.RECENT, column] *= math.exp(-waited / kernel.RECENT_S)

    def _report_levels(self, column: int, load: Load, unseen: list[tuple[int, float]]) -> None:
        if not load.priorities and not any(priority for priority, _ in unseen):
            self._levels.pop(column, None)
            return
        said = load.priorities or (PriorityLoad(0, load.waiting + load.running, 0, load.queued_prefill_tokens),)
        backlog = Levels({one.priority: float(one.queued_prefill_tokens) for one in said})
        requests = Levels({one.priority: float(one.requests) for one in said})
        for priority, tokens in unseen:
            backlog.add(priority, tokens)
            requests.add(priority, 1)
        self._levels[column] = backlog, requests

    def check_integrity(self) -> None:
        assert len(set(self._free)) == len(self._free) <= self._values.shape[1]
        assert np.isfinite(self._values).all()
        assert (self._values[kernel.NEVER_NEGATIVE] >= 0).all()


def _seats(load: Load) -> float:
    """Requests that run at once. Where some wait, as many as its blocks hold, by what the running ones hold."""
    if not load.waiting or not load.running or not load.blocks_used:
        return load.slots
    return min(load.slots, load.blocks_total / load.blocks_used * load.running)


_RESTORE_ROW = {tier.value: row for row, tier in enumerate(PRICED_TIERS, kernel.RESTORE)}
