"""What is simulated: requests with their arrival, lengths and block hashes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvfleet.placement.index.prefix_index import Hashes, unpack


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `hashes` `[blocks, 2]`; the last block may be partial."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]  # of its blocks, small numbers: what the simulated caches hold
    hashes: Hashes
    session: str


@dataclass(frozen=True, slots=True)
class Trace:
    """`block_tokens` is the size of a block."""

    arrivals: tuple[Arrival, ...]
    block_tokens: int

    @property
    def duration_s(self) -> float:
        return self.arrivals[-1].at_s if self.arrivals else 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(arrival.prompt_tokens for arrival in self.arrivals)

    @property
    def distinct_blocks(self) -> int:
        return len({block for arrival in self.arrivals for block in arrival.ids})

    def at_speed(self, speed: float) -> Trace:
        """The same requests, so many times as dense."""
        return replace(self, arrivals=tuple(replace(one, at_s=one.at_s / speed) for one in self.arrivals))

    def swollen(self, by: float) -> Trace:
        """The same requests in the same time, few at its ends and many in its middle: at a rate that goes from (1 - by)
        times what it was to (1 + by) times and back, as a cosine does. `by` is within [0, 1]."""
        duration = self.duration_s
        if not duration:
            return self
        grid = np.linspace(0, duration, 20_001)
        before = grid - by * duration / (2 * np.pi) * np.sin(2 * np.pi * grid / duration)
        times = np.interp([arrival.at_s for arrival in self.arrivals], before, grid).tolist()
        moved = zip(self.arrivals, times, strict=True)
        return replace(self, arrivals=tuple(replace(one, at_s=at_s) for one, at_s in moved))

    def spread(self) -> Trace:
        """Requests of one moment evenly over the time to the next: where a coarse clock has gathered them."""
        times = sorted({arrival.at_s for arrival in self.arrivals})
        following = dict(zip(times, [*times[1:], times[-1] if times else 0.0], strict=True))
        count = Counter(arrival.at_s for arrival in self.arrivals)
        turn: Counter[float] = Counter()
        spread = []
        for arrival in self.arrivals:
            began = arrival.at_s
            at_s = began + (following[began] - began) * turn[began] / count[began]
            turn[began] += 1
            spread.append(replace(arrival, at_s=at_s))
        return replace(self, arrivals=tuple(spread))


@dataclass(frozen=True, slots=True)
class Row:
    """A request as it was recorded. `blocks` are names, each of its block and all before it. Without a session it goes
    on with the one whose blocks it begins with."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[str]
    session: str = ""


def make_trace(rows: Sequence[Row], block_tokens: int) -> Trace:
    numbers: dict[str, int] = {}
    for row in rows:
        for name in row.blocks:
            numbers.setdefault(name, len(numbers))
    hashes = _hashes_of(len(numbers))
    first = min((row.at_s for row in rows), default=0.0)
    arrivals: list[Arrival] = []
    sessions = TraceSessions()
    for row in sorted(rows, key=lambda row: row.at_s):
        ids = tuple(numbers[name] for name in row.blocks)
        session = row.session or f"s{sessions.of(ids)}"
        prompt, output = max(row.prompt_tokens, 1), max(row.output_tokens, 1)
        found = hashes[np.array(ids, dtype=np.int64)]
        arrivals.append(Arrival(len(arrivals), row.at_s - first, prompt, output, ids, found, session))
    return Trace(tuple(arrivals), block_tokens)


def _hashes_of(count: int) -> Hashes:
    """Numbers well spread over 128 bits (splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    state = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return unpack((state ^ (state >> np.uint64(31))).astype("<u8").tobytes())


class TraceSessions:
    """Which conversation a request goes on with: the one all of whose full blocks it begins with."""

    def __init__(self) -> None:
        self._by_tail: dict[int, int] = {}  # last full block of a request -> its session
        self._count = 0

    def of(self, ids: Sequence[int]) -> int:
        """A prompt without blocks, as text has that nobody tokenised, goes on with nothing."""
        for block in reversed(ids):
            session = self._by_tail.get(block)
            if session is not None:
                break
        else:
            session, self._count = self._count, self._count + 1
        if len(ids) > 2:  # one or two blocks may be what all requests begin with
            self._by_tail[ids[-2]] = session
        return session
