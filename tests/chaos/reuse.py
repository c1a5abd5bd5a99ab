"""Loop: how many prompt tokens the workers of a run took from each tier, over all lives of their processes."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvproto.messages import Tier
from kvproto.tasks import end
from tests.chaos.fleet import Fleet

PERIOD_S = 0.5


class ReuseWatch:
    """Owns a task that reads heartbeats. A process that ends takes what it counted last with it, at most a period's."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: dict[tuple[str, str], dict[str, int]] = {}  # by life: tokens by tier
        self._task = asyncio.create_task(self._watch(), name="reuse-watch")

    async def stop(self) -> dict[str, int]:
        """`tokens from device`, ... as they were counted."""
        await end([self._task])
        self._read()
        total: Counter[str] = Counter()
        for counts in self._seen.values():
            total.update(counts)
        return {f"tokens from {tier}": count for tier, count in total.items()}

    async def _watch(self) -> None:
        while True:
            self._read()
            await asyncio.sleep(PERIOD_S)

    def _read(self) -> None:
        for worker, view in self._fleet.observer.members.view.workers.items():
            if view.heartbeat is None:
                continue
            load = view.heartbeat.load
            below = {tier: one.hit_tokens_total for tier, one in load.tiers.items()}
            device = {Tier.DEVICE.value: load.hit_tokens_total - sum(below.values())}
            self._seen[worker, view.heartbeat.epoch] = device | below
