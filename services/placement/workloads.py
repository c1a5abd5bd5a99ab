"""What each worker has to do, as columns of numbers: one decision looks at all workers at once. Pure.

A worker's prefill backlog is taken as a fluid: it drains at the worker's measured rate, grows by what is booked, and is
set right by every heartbeat. So between two heartbeats a burst sees its own weight, and a queue that empties is empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvproto.messages import Load, Rates, Tier

Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = npt.NDArray[np.int64]

TIERS: tuple[Tier, ...] = tuple(Tier)
UNMEASURED_RATE = 1000.0  # prefill tokens/s of a fleet where nobody has measured any
RECENT_S = 60.0  # what a worker was given counts as recent for about so long
FORGIVEN_S = 120.0  # after so long without a new measurement, two thirds of a low rate are forgotten
FIRST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """One worker's column, for those who look at one."""

    requests: float
    backlog_tokens: float
    prefill_tokens_per_s: float


class View:
    """Some workers at one moment; everything is `[workers]`. What is asked for is worked out then."""

    __slots__ = ("_restore", "_values", "now", "prefill_rate", "requests")

    def __init__(self, values: Floats, restore: Floats, now: float) -> None:
        self._values = values
        self._restore = restore
        self.now = now
        self.requests: Floats = values[_REQUESTS]
        self.prefill_rate = _hopeful(values[_RATE], values[_RATE_AT], now)
        """Tokens/s: see `_hopeful`."""

    @property
    def credit(self) -> Floats:
        """What share of the blocks that it is said to hold is believed."""
        credit: Floats = self._values[_CREDIT]
        return credit

    @property
    def backlog_s(self) -> Floats:
        """Seconds until what is queued has been prefilled."""
        values = self._values
        left: Floats = values[_BACKLOG] / self.prefill_rate + (values[_AT] - self.now)
        return np.maximum(left, 0.0, out=left)

    @property
    def recent_share(self) -> Floats:
        """Seconds of prefill given lately, per second: 1 is a worker that is just busy all the time."""
        values = self._values
        fades = np.exp((values[_AT] - self.now) / RECENT_S)
        share: Floats = values[_RECENT] * fades / (self.prefill_rate * RECENT_S)
        return share

    @property
    def step_s(self) -> Floats:
        """Seconds of a decode step of those who are there, as each makes it longer.

        What one adds is at most the least time that a decoded token takes anywhere: with few of them most of a step
        is not theirs.
        """
        each = self._values[_TOKEN_S]
        least = float(np.min(each, initial=np.inf, where=each > 0))
        seconds: Floats = self.requests * (least if least < np.inf else 0.0)
        return seconds

    @property
    def slot_wait_s(self) -> Floats:
        """Seconds until a slot is free, from how long requests stay."""
        slots = self._values[_SLOTS]
        ahead = self.requests - slots + 1
        waits: Floats = np.where((slots > 0) & (ahead > 0), ahead, 0.0)
        if waits.any():
            waits *= self._values[_STAY] / np.maximum(slots, 1.0)
        return waits

    @property
    def cache_usage(self) -> Floats:
        """Share of KV blocks that running sequences hold; 0 where that is not known."""
        usage: Floats = self._values[_BLOCKS_USED] / np.maximum(self._values[_BLOCKS], 1.0)
        return usage

    @property
    def slot_usage(self) -> Floats:
        """Requests, waiting ones too, as a share of slots."""
        usage: Floats = self.requests / np.maximum(self._values[_SLOTS], 1.0)
        return usage

    def restore_s_per_block(self, tier: int) -> Floats:
        """Seconds to bring one block to the device; infinite where nothing was measured."""
        rates, size = self._restore[tier], self._values[_BLOCK_BYTES]
        known = (rates > 0) & (size > 0)
        return np.where(known, size / np.where(known, rates, 1.0), np.inf)


def _hopeful(rates: Floats, measured_at: Floats, now: float) -> Floats:
    """Rates as measured. Who has not measured is taken for the mean of those who have; and whoever measured less long
    ago is taken for that little by little: one bad measurement would else keep all work, and so any better one, away.
    """
    measured = rates > 0
    if not measured.any():
        return np.full(len(rates), UNMEASURED_RATE)
    mean = float(rates.mean(where=measured))
    below = mean - rates
    if below.max() <= 0.1 * mean:
        return rates
    hope = np.where(measured, 1 - np.exp((measured_at - now) / FORGIVEN_S), 1.0)
    hoped: Floats = rates + np.maximum(below, 0.0) * hope
    return hoped


class Workloads:
    """Owned by the core. A column belongs to one life of one worker; `now` never goes back."""

    def __init__(self) -> None:
        self.now = 0.0  # the latest time heard of
        self._size = 0
        self._free: list[int] = []
        self._values: Floats = np.zeros((len(_FIELDS), FIRST_COLUMNS))
        self._restore: Floats = np.zeros((len(TIERS), FIRST_COLUMNS))

    # ------------------------------------------------------------------ columns

    def add(self, block_bytes: float, now: float) -> int:
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
        self._values[_AT, column] = now
        self._values[_CREDIT, column] = 1.0
        self._values[_BLOCK_BYTES, column] = block_bytes
        return column

    def drop(self, column: int) -> None:
        self._free.append(column)

    # ------------------------------------------------------------------ what workers say, and what they are given

    def report(
        self, column: int, load: Load, rates: Rates, unseen_tokens: float, unseen_requests: int, now: float
    ) -> None:
        """A heartbeat; `unseen` is what was booked and cannot be in it yet."""
        values = self._values
        self._drain(column, now)
        if rates.prefill_tokens_per_s != values[_RATE, column]:
            values[_RATE, column], values[_RATE_AT, column] = rates.prefill_tokens_per_s, now
        values[_BACKLOG, column] = load.queued_prefill_tokens + unseen_tokens
        values[_REQUESTS, column] = load.waiting + load.running + unseen_requests
        values[_SLOTS, column] = load.slots
        if rates.decode_tokens_per_s:
            values[_TOKEN_S, column] = 1 / rates.decode_tokens_per_s
        values[_BLOCKS_USED, column] = load.blocks_used
        values[_BLOCKS, column] = load.blocks_total
        for tier, rate in rates.restore_bytes_per_s.items():
            if tier in _TIER_NUMBER and math.isfinite(rate) and rate >= 0:
                self._restore[_TIER_NUMBER[tier], column] = rate

    def give(self, column: int, tokens: float, now: float) -> None:
        """A request with so many tokens to prefill."""
        self._drain(column, now)
        self._values[_REQUESTS, column] += 1
        self._values[_BACKLOG, column] += tokens
        self._values[_RECENT, column] += tokens

    def correct(self, column: int, tokens: float, now: float) -> None:
        """The tokens to prefill turned out to be more, or fewer."""
        self._drain(column, now)
        self._values[_BACKLOG, column] = max(0.0, self._values[_BACKLOG, column] + tokens)
        self._values[_RECENT, column] = max(0.0, self._values[_RECENT, column] + tokens)

    def take(self, column: int, tokens: float, now: float) -> None:
        """The request is gone, and so many of its tokens will never be prefilled."""
        self.correct(column, -tokens, now)
        self._values[_REQUESTS, column] = max(0.0, self._values[_REQUESTS, column] - 1)

    def stayed(self, column: int, seconds: float) -> None:
        """A request left, so long after it had started."""
        old = self._values[_STAY, column]
        self._values[_STAY, column] = old + (seconds - old) * 0.1 if old else seconds

    def trust(self, column: int, credit: float) -> None:
        """What share of the blocks that the worker is said to hold is believed."""
        self._values[_CREDIT, column] = credit

    # ------------------------------------------------------------------ questions

    def view(self, columns: Columns, now: float) -> View:
        """These workers as they are now, in the order of `columns`."""
        return View(self._values.take(columns, axis=1), self._restore.take(columns, axis=1), now)

    def of(self, column: int, now: float) -> Workload:
        one = self.view(np.array([column]), now)
        backlog = one.backlog_s * one.prefill_rate
        return Workload(float(one.requests[0]), float(backlog[0]), float(self._values[_RATE, column]))

    # ------------------------------------------------------------------ inside

    def _drain(self, column: int, now: float) -> None:
        values = self._values
        waited = now - values[_AT, column]
        values[_AT, column] = self.now = now
        rate = values[_RATE, column] or UNMEASURED_RATE
        values[_BACKLOG, column] = max(0.0, values[_BACKLOG, column] - waited * rate)
        values[_RECENT, column] *= math.exp(-waited / RECENT_S)

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert len(set(self._free)) == len(self._free) <= self._size
        assert np.isfinite(self._values).all()
        assert (self._values[_NEVER_NEGATIVE] >= 0).all()


_FIELDS = range(13)
(
    _RATE,
    _BACKLOG,
    _AT,
    _REQUESTS,
    _SLOTS,
    _STAY,
    _RECENT,
    _CREDIT,
    _BLOCK_BYTES,
    _BLOCKS_USED,
    _BLOCKS,
    _TOKEN_S,
    _RATE_AT,
) = _FIELDS
_NEVER_NEGATIVE = [_RATE, _BACKLOG, _REQUESTS, _SLOTS, _STAY, _RECENT, _CREDIT]
_TIER_NUMBER = {tier.value: number for number, tier in enumerate(TIERS)}
