"""When a request goes to another region, and where a prompt's blocks may be since. Pure. Other regions send one summary
a second, and choose the worker themselves.

    own wait <= spill wait                        stays
    own wait >  spill wait, other wait * 2 < own  goes
    no worker ready here, or refused here         goes to the region that waits least
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict

from kvfleet.placement.index.prefix_index import Hashes
from kvproto.messages import WentAbroad
from kvproto.regions import Regions

FAR_SOONER = 2.0  # times; a wait there is a second old, and K and V may have to travel
MAX_TRACES = 65_536
TRACE_S = 3600.0
MOST_LOOKS = 32
WORTH_S = 0.1  # of prefill that another region's blocks must save


class RegionSummaries:
    """Owned by the core. `own` "": there are no other regions."""

    def __init__(self, own: str, spill_s: float) -> None:
        self.regions = Regions(own)
        self.referred_total = 0
        self.hinted_total = 0  # placements with the name of a region that may have more of the prompt
        self._spill_s = spill_s
        self._traces: OrderedDict[bytes, tuple[WentAbroad, float]] = OrderedDict()  # by the prompt's last block; when
        self._lengths: Counter[int] = Counter()  # of the traces, in blocks
        self._new: list[WentAbroad] = []

    def tick(self, now: float) -> None:
        self.regions.forget_silent(now)
        while self._traces and now - next(iter(self._traces.values()))[1] > TRACE_S:
            self._forget(next(iter(self._traces)))

    def refer(self, model: str, own_wait_s: float | None, excluded: tuple[str, ...], now: float) -> str | None:
        """The region to go to; None to stay. `own_wait_s` None: it cannot be served here."""
        if not self.regions.own or (own_wait_s is not None and own_wait_s <= self._spill_s):
            return None
        waits = self.regions.ready(model, now, excluded)
        if not waits:
            return None
        region = min(waits, key=lambda name: (waits[name], name))
        if own_wait_s is not None and waits[region] * FAR_SOONER >= own_wait_s:
            return None
        self.referred_total += 1
        return region

    def trace(self, hashes: Hashes, region: str, now: float) -> None:
        """A request with this prompt goes there: later prompts may find its blocks there."""
        if len(hashes):
            one = WentAbroad(hashes[-1].tobytes(), len(hashes), region)
            self._new.append(one)
            self.learn(one, now)

    def learn(self, one: WentAbroad, now: float) -> None:
        self._forget(one.last)
        self._traces[one.last] = one, now
        self._lengths[one.blocks] += 1
        if len(self._traces) > MAX_TRACES:
            self._forget(next(iter(self._traces)))

    def take_new(self) -> tuple[WentAbroad, ...]:
        """Traces since the last call, for other replicas."""
        new, self._new = tuple(self._new), []
        return new

    def refused(self, hashes: Hashes) -> None:
        """The region that a request with this prompt was referred to did not take it."""
        if len(hashes):
            self._forget(hashes[-1].tobytes())

    def elsewhere(self, hashes: Hashes, block_size: int, hit_tokens: int, tokens_per_s: float) -> str:
        """A region that may have enough more than `hit_tokens`, or ""; looks at the MOST_LOOKS longest traces."""
        if not self._traces or not len(hashes) or not tokens_per_s:
            return ""
        least = (hit_tokens + WORTH_S * tokens_per_s) / block_size  # blocks
        lengths = [blocks for blocks in self._lengths if least <= blocks <= len(hashes)]
        for blocks in heapq.nlargest(MOST_LOOKS, lengths):
            found = self._traces.get(hashes[blocks - 1].tobytes())
            if found is not None and self.regions.is_there(found[0].region):
                self.hinted_total += 1
                return found[0].region
        return ""

    def _forget(self, last: bytes) -> None:
        if (known := self._traces.pop(last, None)) is not None:
            self._lengths[known[0].blocks] -= 1
            if not self._lengths[known[0].blocks]:
                del self._lengths[known[0].blocks]

    def check_integrity(self) -> None:
        assert self._lengths == Counter(one.blocks for one, _ in self._traces.values())
