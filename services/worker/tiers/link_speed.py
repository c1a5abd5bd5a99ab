"""How fast a vault or peer is, from what was fetched from it. Pure: durations in, an estimate out.

    seconds of a fetch  =  latency  +  bytes x seconds per byte      (bytes as they lie in the pool)

A regression that forgets: each measurement weighs KEPT of the next one, and less the longer it took, so that a single
bad one moves little and a change that lasts is followed. A fetch that was given up is believed at once, as the next one
would be given up too; so is the first probe after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

COPIES = 5  # of which the speed is the median
LEAST_BYTES = 64 * 1024  # fewer say more about latency than about speed

KEPT = 0.8  # of each measurement's weight when the next one comes
SHRINK_WEIGHT = 0.3  # of the newest fetch
PROBE_AFTER_S = 30.0  # without any measurement
PROBE_SOON_S = 2.0  # after a failure; doubles up to the above while probes do not help
LEAST_S = 1e-6
LEAST_PER_BYTE_S = 1e-13
LEAST_SHARE = 0.1  # of a probe or a failed fetch that counts as its bytes', however long the latency
WORSE = 1.25  # times what was expected, before a fetch that was given up says anything
TELLING = 1e-3  # spread of sizes, relative, below which they do not tell latency from bytes
COMPARED_BYTES = 16 * 1024 * 1024
TOLERATED = 4.0  # times slower than the fastest, and
TOLERATED_S = 0.05  # so much, for what is compared: among fast ones the ratio is noise


class LinkSpeed(NamedTuple):
    """A fetch of n bytes takes about `latency_s + n / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True)
class CopySpeed:
    """Copies in memory in one direction: no latency to speak of. The median of the last ones, as one that waited for a
    core must not end all restores, without which nothing would be measured again. 0 until measured."""

    bytes_per_s: float = 0.0
    bytes_total: int = 0
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=COPIES))

    def probed(self, count: int, seconds: float) -> None:
        """Also of few bytes."""
        if count and seconds > 0:
            self._rates.append(count / seconds)
            self.bytes_per_s = median_low(self._rates)

    def observe(self, count: int, seconds: float) -> None:
        self.bytes_total += count
        if count >= LEAST_BYTES:
            self.probed(count, seconds)

    def seconds(self, count: int) -> float:
        return count / self.bytes_per_s if self.bytes_per_s else 0.0


@dataclass(slots=True)
class LinkSpeedMeter:
    _latency: float = 0.0
    _per_byte: float = 0.0  # 0: nothing is known
    _w: float = 0.0  # sums over measurements: weights,
    _n: float = 0.0  # bytes,
    _s: float = 0.0  # seconds,
    _nn: float = 0.0  # bytes^2,
    _sn: float = 0.0  # bytes x seconds
    _measured_at: float = float("-inf")
    _probe_after: float = PROBE_AFTER_S
    _suspect: bool = False
    _shrunk: float = 1.0  # bytes on the wire for a byte of blocks

    @property
    def speed(self) -> LinkSpeed | None:
        return LinkSpeed(self._latency, 1 / self._per_byte) if self._per_byte else None

    def due(self, now: float) -> bool:
        return now - self._measured_at >= self._probe_after

    def fetched(self, nbytes: int, seconds: float, now: float, wire_bytes: int) -> None:
        """A fetch brought all its blocks: `nbytes`, that travelled as `wire_bytes`."""
        if nbytes <= 0:
            return
        self._measured_at = now
        self._suspect = False
        self._probe_after = PROBE_AFTER_S
        self._shrunk += SHRINK_WEIGHT * (wire_bytes / nbytes - self._shrunk)
        self._note(nbytes, seconds)
        self._set(*self._fitted())

    def given_up(self, nbytes: int, seconds: float, now: float) -> None:
        """A fetch failed, or took too long: it had brought `nbytes` by then. Ignored if no more could be expected."""
        known = self.speed
        if known is None or seconds <= WORSE * seconds_of(known, nbytes):
            return
        if nbytes:
            self._believe(self._latency, max(seconds - self._latency, LEAST_SHARE * seconds) / nbytes)
        else:
            self._believe(seconds, self._per_byte)
        self._probe_after = min(self._probe_after * 2, PROBE_AFTER_S) if self._suspect else PROBE_SOON_S
        self._suspect = True
        self._measured_at = now

    def probed(self, small_s: float, nbytes: int, seconds: float, now: float) -> None:
        """An empty echo took `small_s`, one of `nbytes` `seconds`."""
        blocks = nbytes / self._shrunk  # what would have travelled as that many bytes
        if self._suspect or not self._per_byte:
            self._believe(small_s, max(seconds - small_s, LEAST_SHARE * seconds, LEAST_S) / blocks)
        else:
            self._note(0.0, small_s)
            self._note(blocks, seconds)
            self._set(*self._fitted())
        self._probe_after = min(self._probe_after * 2, PROBE_AFTER_S)
        self._measured_at = now

    def doubt(self) -> None:
        """The source failed, or seems too slow to be asked: a probe comes soon, and is believed."""
        if not self._suspect:
            self._suspect = True
            self._probe_after = PROBE_SOON_S

    def _believe(self, latency: float, per_byte: float) -> None:
        self._w = self._n = self._s = self._nn = self._sn = 0.0
        self._set(latency, per_byte)
        self._note(0.0, latency)
        self._note(COMPARED_BYTES, latency + COMPARED_BYTES * per_byte)

    def _note(self, nbytes: float, seconds: float) -> None:
        seconds = max(seconds, LEAST_S)
        weight = 1 / seconds
        self._w = KEPT * self._w + weight
        self._n = KEPT * self._n + weight * nbytes
        self._s = KEPT * self._s + weight * seconds
        self._nn = KEPT * self._nn + weight * nbytes * nbytes
        self._sn = KEPT * self._sn + weight * nbytes * seconds

    def _set(self, latency: float, per_byte: float) -> None:
        self._latency, self._per_byte = latency, max(per_byte, LEAST_PER_BYTE_S)

    def _fitted(self) -> tuple[float, float]:
        spread = self._w * self._nn - self._n * self._n
        if spread <= TELLING * self._w * self._nn:  # all of one size: both are as much longer or shorter
            off = self._s / (self._w * self._latency + self._n * self._per_byte) if self._per_byte else 0.0
            return self._latency * off, self._per_byte * off or self._s / self._n
        per_byte = (self._w * self._sn - self._n * self._s) / spread
        latency = (self._s - per_byte * self._n) / self._w
        if per_byte <= 0:
            return self._s / self._w, LEAST_SHARE * self._s / self._n
        if latency < 0:
            return 0.0, self._sn / self._nn
        return latency, per_byte


def seconds_of(speed: LinkSpeed, nbytes: int) -> float:
    return speed.latency_s + nbytes / speed.bytes_per_s


def is_laggard(speed: LinkSpeed, others: Iterable[LinkSpeed]) -> bool:
    """Whether a source is so much slower than the fastest that its blocks count as absent."""
    fastest = min((seconds_of(other, COMPARED_BYTES) for other in others), default=float("inf"))
    return seconds_of(speed, COMPARED_BYTES) > max(TOLERATED * fastest, fastest + TOLERATED_S)


def slowest(speeds: Iterable[LinkSpeed]) -> LinkSpeed | None:
    """What a fetch from several at once can rely on."""
    return max(speeds, key=lambda speed: seconds_of(speed, COMPARED_BYTES), default=None)
