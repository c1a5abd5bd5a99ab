"""Requests with their arrival, lengths and block hashes, made of rows that were recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path

import numpy as np

from kvfleet.placement.index.prefix_index import Hashes, unpack
from kvservice.trace_rows import Row, parse_rows, read_rows


@dataclass(frozen=True, slots=True)
class Arrival:
    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]  # of its blocks, small numbers: what the simulated caches hold
    hashes: Hashes  # [blocks, 2]; the last block may be partial
    session: str
    tool: str = ""  # that its answer calls


@dataclass(frozen=True, slots=True)
class Trace:
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
        """The same requests in the same time, at a rate that goes from (1 - by) times the old one to (1 + by) times and
        back, as a cosine does. `by` is within [0, 1]."""
        duration = self.duration_s
        if not duration:
            return self
        grid = np.linspace(0, duration, 20_001)
        before = grid - by * duration / (2 * np.pi) * np.sin(2 * np.pi * grid / duration)
        times = np.interp([arrival.at_s for arrival in self.arrivals], before, grid).tolist()
        moved = zip(self.arrivals, times, strict=True)
        return replace(self, arrivals=tuple(replace(one, at_s=at_s) for one, at_s in moved))

    def spread(self) -> Trace:
        """Requests of one moment evenly over the time to the next, for coarse clocks."""
        moments = [list(members) for _, members in groupby(self.arrivals, lambda arrival: arrival.at_s)]
        following = [*(members[0].at_s for members in moments[1:]), self.duration_s]
        spread: list[Arrival] = []
        for members, ends in zip(moments, following, strict=False):
            step_s = ends - members[0].at_s
            spread += (replace(one, at_s=one.at_s + step_s * n / len(members)) for n, one in enumerate(members))
        return replace(self, arrivals=tuple(spread))


def make_trace(rows: Sequence[Row], block_tokens: int) -> Trace:
    names = dict.fromkeys(name for row in rows for name in row.blocks)
    numbers = {name: number for number, name in enumerate(names)}
    hashes = _hashes_of(len(numbers))
    first = min((row.at_s for row in rows), default=0.0)
    arrivals: list[Arrival] = []
    by_tail: dict[int, int] = {}
    new_sessions = count()
    for row in sorted(rows, key=lambda row: row.at_s):
        ids = tuple(numbers[name] for name in row.blocks)
        session = row.session or f"s{_session_of(ids, by_tail, new_sessions)}"
        prompt, output = max(row.prompt_tokens, 1), max(row.output_tokens, 1)
        found = hashes[np.array(ids, dtype=np.int64)]
        arrivals.append(Arrival(len(arrivals), row.at_s - first, prompt, output, ids, found, session, row.tool))
    return Trace(tuple(arrivals), block_tokens)


def _hashes_of(count: int) -> Hashes:
    """Numbers well spread over 128 bits (splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    state = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return unpack((state ^ (state >> np.uint64(31))).astype("<u8").tobytes())


def _session_of(ids: Sequence[int], by_tail: dict[int, int], new: Iterator[int]) -> int:
    """The session all of whose full blocks the request begins with. `by_tail`: last full block of a request -> its
    session."""
    session = next((by_tail[block] for block in reversed(ids) if block in by_tail), None)
    if session is None:
        session = next(new)
    if len(ids) > 2:  # one or two blocks may begin all requests
        by_tail[ids[-2]] = session
    return session


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The first `limit` requests. Raises InvalidRequest, which names the line, and OSError."""
    return make_trace(*read_rows(path, limit))


def parse_trace(lines: Iterable[str], limit: int | None = None) -> Trace:
    """Raises InvalidRequest."""
    return make_trace(*parse_rows(lines, limit))
