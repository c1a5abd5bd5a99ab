"""What each worker has to do, as columns of numbers: one decision looks at all workers at once. Pure.

A worker's prefill backlog is taken as a fluid: it drains at the worker's measured rate, grows by what is booked, and is
set right by every heartbeat. So between two heartbeats a burst sees its own weight, and a queue that empties is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvfleet.placement.index.changes import TIERS
from kvfleet.placement.workers import price_kernel
from kvfleet.placement.workers.price_kernel import (
    AHEAD,
    AHEAD_REQUESTS,
    AT,
    BACKLOG,
    BLOCK_TOKENS,
    BLOCKS,
    BLOCKS_USED,
    CREDIT,
    LOAD_ROWS,
    NEVER_NEGATIVE,
    OUTPUT,
    RATE,
    RATE_AT,
    RECENT,
    RECENT_S,
    REQUESTS,
    SLOTS,
    STAY,
    STEP_S,
    TOKEN_BYTES,
    TOKEN_S,
    UNMEASURED_RATE,
)
from kvproto.messages import Load, PriorityLoad, Rates, Tier

Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = npt.NDArray[np.int64]

PRICED_TIERS = (*TIERS, Tier.PEER)  # where a worker gets blocks from: rows of what is matched and of restore rates
FIRST_COLUMNS = 64
LEAST_RATE = 1e-3  # tokens/s: a worker that says less has not measured


class Levels:
    """Work by priority, as a fluid that is served from the top: what drains is of the highest priority that is left, so
    what is ahead of a request is the work of its own priority and of higher ones, however much there is below.

    Amounts are never negative. There are as many levels as there are priorities, 201 at most.
    """

    __slots__ = ("_amounts",)

    def __init__(self, amounts: dict[int, float] | None = None) -> None:
        self._amounts = amounts or {}

    def __bool__(self) -> bool:
        return bool(self._amounts)

    @property
    def total(self) -> float:
        return sum(self._amounts.values())

    def add(self, priority: int, amount: float) -> None:
        """A negative amount takes away what is there of this priority."""
        left = self._amounts.get(priority, 0.0) + amount
        if left > 0:
            self._amounts[priority] = left
        else:
            self._amounts.pop(priority, None)

    def drain(self, amount: float) -> None:
        for priority in sorted(self._amounts, reverse=True):
            if amount <= 0:
                return
            taken = min(amount, self._amounts[priority])
            amount -= taken
            self.add(priority, -taken)

    def ahead(self, priority: int) -> float:
        """Of this priority and of higher ones."""
        return sum(amount for level, amount in self._amounts.items() if level >= priority)


@dataclass(frozen=True, slots=True)
class Workload:
    """One worker's column, for those who look at one."""

    requests: float
    backlog_tokens: float
    prefill_tokens_per_s: float


class View:
    """Some workers at one moment; everything is `[workers]`."""

    __slots__ = ("_restore", "_values", "now")

    def __init__(self, values: Floats, restore: Floats, now: float) -> None:
        self._values = values
        self._restore = restore
        self.now = now

    def price(
        self, matched: Floats, tokens: int, *, heat: float = 0.0, others: float = 0.0, busy: float = 0.0
    ) -> Floats:
        """What a request of `tokens`, of which `matched` `[4, workers]` are cached, would cost, in seconds: a row for
        each of `price_kernel.TERMS`, and their sum; then the tokens that would be restored from each tier."""
        out = np.empty((price_kernel.ROWS, self._values.shape[1]))
        price_kernel.price(self._values, self._restore, matched, tokens, heat, self.now, others, busy, out)
        return out

    def waits(self) -> Floats:
        """Seconds until a request would be begun; 0 where nothing was ever measured."""
        out = np.empty(self._values.shape[1])
        price_kernel.waits(self._values, self.now, out)
        return out

    def turn_s(self, tokens: int) -> float:
        """How long all of them together are busy with one request of so many prompt tokens."""
        values = self._values
        rates = values[RATE][values[RATE] > 0]
        stays = values[STAY] / np.maximum(values[SLOTS], 1.0)
        prefill = tokens / float(rates.mean()) if len(rates) else 0.0
        return (prefill + float(stays.mean())) / max(len(stays), 1)

    @property
    def requests(self) -> Floats:
        requests: Floats = self._values[REQUESTS]
        return requests

    @property
    def cache_usage(self) -> Floats:
        """Share of KV blocks that running sequences hold; 0 where that is not known."""
        usage: Floats = self._values[BLOCKS_USED] / np.maximum(self._values[BLOCKS], 1.0)
        return usage

    @property
    def slot_usage(self) -> Floats:
        """Requests, waiting ones too, as a share of slots."""
        usage: Floats = self.requests / np.maximum(self._values[SLOTS], 1.0)
        return usage


class Workloads:
    """Owned by the core. A column belongs to one life of one worker; `now` never goes back."""

    def __init__(self) -> None:
        self.now = 0.0  # the latest time heard of
        self._size = 0
        self._free: list[int] = []
        self._values: Floats = np.zeros((LOAD_ROWS, FIRST_COLUMNS))
        self._restore: Floats = np.zeros((len(PRICED_TIERS), FIRST_COLUMNS))
        self._levels: dict[int, tuple[Levels, Levels]] = {}  # backlog and requests, where not all is of priority 0

    # ------------------------------------------------------------------ columns

    def add(self, token_bytes: float, block_tokens: int, now: float) -> int:
        if self._free:
            column = self._free.pop()
        else:
            column = self._size
            self._size += 1
            if column == self._values.shape[1]:
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
                self._restore = np.concatenate([self._restore, np.zeros_like(self._restore)], axis=1)
        self._values[:, column] = 0.0
        self._restore[:, column] = 0.0
        self._values[AT, column] = now
        self._values[CREDIT, column] = 1.0
        self._values[TOKEN_BYTES, column] = token_bytes
        self._values[BLOCK_TOKENS, column] = block_tokens
        self._levels.pop(column, None)
        return column

    def weigh(self, column: int, token_bytes: float) -> None:
        """What a token's K and V have turned out to take."""
        self._values[TOKEN_BYTES, column] = token_bytes

    def drop(self, column: int) -> None:
        self._free.append(column)

    # ------------------------------------------------------------------ what workers say, and what they are given

    def report(self, column: int, load: Load, rates: Rates, unseen: Iterable[tuple[int, float]], now: float) -> None:
        """A heartbeat; `unseen` is what was booked and cannot be in it yet, request by request: priority, tokens."""
        values = self._values
        unseen = list(unseen)
        self._drain(column, now)
        self._report_levels(column, load, unseen)
        rate = rates.prefill_tokens_per_s if rates.prefill_tokens_per_s >= LEAST_RATE else 0.0
        if rate != values[RATE, column]:
            values[RATE, column], values[RATE_AT, column] = rate, now
        values[BACKLOG, column] = load.queued_prefill_tokens + sum(tokens for _, tokens in unseen)
        values[REQUESTS, column] = load.waiting + load.running + len(unseen)
        values[SLOTS, column] = load.slots
        if rates.decode_tokens_per_s >= LEAST_RATE:
            values[TOKEN_S, column] = 1 / rates.decode_tokens_per_s
        if rates.decode_steps_per_s >= LEAST_RATE:
            values[STEP_S, column] = 1 / rates.decode_steps_per_s
        values[BLOCKS_USED, column] = load.blocks_used
        values[BLOCKS, column] = load.blocks_total
        for tier, rate in rates.restore_bytes_per_s.items():
            if tier in _TIER_NUMBER and math.isfinite(rate) and rate >= 0:
                self._restore[_TIER_NUMBER[tier], column] = rate

    def give(self, column: int, tokens: float, now: float, *, priority: int = 0) -> None:
        """A request with so many tokens to prefill."""
        self._drain(column, now)
        if priority or column in self._levels:
            backlog, requests = self._levels_of(column)
            backlog.add(priority, tokens)
            requests.add(priority, 1)
        self._values[REQUESTS, column] += 1
        self._values[BACKLOG, column] += tokens
        self._values[RECENT, column] += tokens

    def correct(self, column: int, tokens: float, now: float, *, queued: bool = True, priority: int = 0) -> None:
        """The tokens to prefill turned out to be more, or fewer. Not `queued`: the worker's own figure has that."""
        self._drain(column, now)
        if queued and column in self._levels:
            self._levels[column][0].add(priority, tokens)
        for row in (BACKLOG, RECENT) if queued else (RECENT,):
            self._values[row, column] = max(0.0, self._values[row, column] + tokens)

    def take(self, column: int, tokens: float, now: float, *, queued: bool = True, priority: int = 0) -> None:
        """The request is gone, and so many of its tokens will never be prefilled."""
        self.correct(column, -tokens, now, queued=queued, priority=priority)
        if column in self._levels:
            self._levels[column][1].add(priority, -1)
        self._values[REQUESTS, column] = max(0.0, self._values[REQUESTS, column] - 1)

    def stayed(self, column: int, seconds: float) -> None:
        """A request left, so long after it had started."""
        self._learn(STAY, column, seconds)

    def generated(self, column: int, tokens: int) -> None:
        """A request ended that had generated so many."""
        self._learn(OUTPUT, column, float(tokens))

    def trust(self, column: int, credit: float) -> None:
        """What share of the blocks that the worker is said to hold is believed."""
        self._values[CREDIT, column] = credit

    # ------------------------------------------------------------------ questions

    def view(self, columns: Columns, now: float, *, priority: int = 0) -> View:
        """These workers as a request of this priority finds them now, in the order of `columns`."""
        values = self._values.take(columns, axis=1)
        if priority <= 0:  # else nothing is ahead, but of whom more is known
            values[AHEAD], values[AHEAD_REQUESTS] = values[BACKLOG], values[REQUESTS]
        if self._levels:
            for number, column in enumerate(columns.tolist()):
                if column in self._levels:
                    backlog, requests = self._levels[column]
                    values[AHEAD, number] = min(values[BACKLOG, number], backlog.ahead(priority))
                    values[AHEAD_REQUESTS, number] = min(values[REQUESTS, number], requests.ahead(priority))
        return View(values, self._restore.take(columns, axis=1), now)

    def credits_of(self, columns: Columns) -> Floats:
        """What share of the blocks that each is said to hold is believed."""
        credits: Floats = self._values[CREDIT].take(columns)
        return credits

    def requests_of(self, columns: Columns) -> Floats:
        """Waiting, running and booked."""
        requests: Floats = self._values[REQUESTS].take(columns)
        return requests

    def of(self, column: int, now: float) -> Workload:
        values = self._values[:, column].tolist()
        backlog = values[BACKLOG] - (now - values[AT]) * (values[RATE] or UNMEASURED_RATE)
        return Workload(values[REQUESTS], max(backlog, 0.0), values[RATE])

    def _drain(self, column: int, now: float) -> None:
        values = self._values
        now = max(now, self.now)  # a milestone that came before its booking is counted with its own time
        waited = now - values[AT, column]
        values[AT, column] = self.now = now
        rate = values[RATE, column] or UNMEASURED_RATE
        values[BACKLOG, column] = max(0.0, values[BACKLOG, column] - waited * rate)
        if column in self._levels:
            self._levels[column][0].drain(waited * rate)
        values[RECENT, column] *= math.exp(-waited / RECENT_S)

    def _learn(self, row: int, column: int, value: float) -> None:
        old = self._values[row, column]
        self._values[row, column] = old + (value - old) * 0.1 if old else value

    def _levels_of(self, column: int) -> tuple[Levels, Levels]:
        """Until now all was of priority 0."""
        levels = self._levels.get(column)
        if levels is None:
            backlog, requests = self._values[BACKLOG, column], self._values[REQUESTS, column]
            levels = self._levels[column] = Levels({0: float(backlog)}), Levels({0: float(requests)})
        return levels

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
        """Raises AssertionError."""
        assert len(set(self._free)) == len(self._free) <= self._size
        assert np.isfinite(self._values).all()
        assert (self._values[NEVER_NEGATIVE] >= 0).all()


_TIER_NUMBER = {tier.value: number for number, tier in enumerate(PRICED_TIERS)}
