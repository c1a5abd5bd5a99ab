"""What is simulated: requests with their arrival, lengths and block hashes. Pure but for reading one file.

Two forms of JSON lines are read, plain or gzipped:

* Mooncake (FAST'25): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one per block of 512 tokens, each
  standing for its block and all before it;
* a ledger that placement recorded: the same, with `hash_ids` as hex strings and `block_tokens` beside them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvproto.errors import InvalidRequest
from services.placement.index.prefix_index import Hashes, unpack

MOONCAKE_BLOCK_TOKENS = 512


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
    def distinct_blocks(self) -> int:
        return len({block for arrival in self.arrivals for block in arrival.ids})

    def at_speed(self, speed: float) -> Trace:
        """The same requests, so many times as dense."""
        return Trace(
            tuple(
                Arrival(a.number, a.at_s / speed, a.prompt_tokens, a.output_tokens, a.ids, a.hashes, a.session)
                for a in self.arrivals
            ),
            self.block_tokens,
        )


def read_trace(path: Path) -> Trace:
    """Raises InvalidRequest that names the line if it cannot be read."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return make_trace(_rows(lines))


def _rows(lines: Iterable[str]) -> list[tuple[float, int, int, list[str], int]]:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            hashes = [str(one) for one in row["hash_ids"]]
            tokens, outputs = int(row["input_length"]), int(row["output_length"])
            block = int(row.get("block_tokens", MOONCAKE_BLOCK_TOKENS))
            rows.append((float(row["timestamp"]) / 1000, tokens, outputs, hashes, block))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(f"line {number} is no request of a trace: {error!r}", field="trace") from None
    if not rows:
        raise InvalidRequest("the trace is empty", field="trace")
    return rows


def make_trace(rows: Sequence[tuple[float, int, int, Sequence[str], int]]) -> Trace:
    """From (seconds, prompt tokens, output tokens, names of blocks, tokens of a block)."""
    numbers: dict[str, int] = {}
    for *_, names, _ in rows:
        for name in names:
            numbers.setdefault(name, len(numbers))
    hashes = _hashes_of(len(numbers))
    first = min(row[0] for row in rows)
    arrivals: list[Arrival] = []
    sessions = Sessions()
    for at, tokens, outputs, names, _ in sorted(rows, key=lambda row: row[0]):
        ids = tuple(numbers[name] for name in names)
        session = sessions.of(ids)
        arrivals.append(
            Arrival(len(arrivals), at - first, tokens, max(outputs, 1), ids, hashes[list(ids)], f"s{session}")
        )
    return Trace(tuple(arrivals), rows[0][4])


def _hashes_of(count: int) -> Hashes:
    """Numbers well spread over 128 bits (splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    state = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return unpack((state ^ (state >> np.uint64(31))).astype("<u8").tobytes())


class Sessions:
    """Which conversation a request goes on with: the one all of whose full blocks it begins with."""

    def __init__(self) -> None:
        self._by_tail: dict[int, int] = {}  # last full block of a request -> its session
        self._count = 0

    def of(self, ids: Sequence[int]) -> int:
        tail = ids[-2] if len(ids) > 1 else ids[-1] if ids else -1
        for block in reversed(ids):
            session = self._by_tail.get(block)
            if session is not None:
                break
        else:
            session, self._count = self._count, self._count + 1
        if len(ids) > 2 or not ids:  # one or two blocks may be what all requests begin with
            self._by_tail[tail] = session
        return session
