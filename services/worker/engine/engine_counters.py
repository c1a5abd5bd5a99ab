"""What this engine has done since its start: plain numbers that any thread may read while they grow.

The engine's thread owns them. What steps take is `schedule.step_times`' business.
"""

from __future__ import annotations

from kvfleet.worker.schedule.giving_way import by_priority
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import Sequence
from kvfleet.worker.schedule.tenants import TenantCosts
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.messages import Load
from kvservice.distribution import Distribution

QUEUE_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EngineCounters:
    def __init__(self) -> None:
        self.steps_total = 0
        self.steps_aborted_total = 0  # all of their sequences were cancelled meanwhile
        self.busy_seconds_total = 0.0  # in steps
        self.prompt_tokens_total = 0
        self.hit_tokens_total = 0  # of prompts: not computed
        self.device_hit_tokens_total = 0  # of these: found on the device, brought from nowhere
        self.fed_tokens_total = 0
        self.generated_tokens_total = 0
        self.queue_waits = Distribution(QUEUE_WAITS_S)  # of attempts, from their coming to their first step
        self.costs = TenantCosts()

    def started(self, sequence: Sequence, now: float) -> None:
        """An attempt runs for the first time, whatever number of choices it asks for."""
        tokens, cached = len(sequence.ids), sequence.cached_tokens
        self.prompt_tokens_total += tokens
        self.hit_tokens_total += cached
        self.device_hit_tokens_total += max(cached - sum(sequence.restored.values()), 0)
        self.queue_waits.observe(now - sequence.enqueued)
        sequence.account.prompt_tokens += tokens
        sequence.account.cached_tokens += cached

    def stepped(self, sequences: int, tokens: int, seconds: float) -> None:
        self.fed_tokens_total += tokens
        self.busy_seconds_total += seconds
        if sequences:
            self.steps_total += 1
            self.costs.share(seconds)

    def load(self, scheduler: Scheduler, tiers: Tiers | None, now: float) -> Load:
        """Requests, blocks and tokens now; `*_total` count since the start."""
        pool, queued = scheduler.pool, scheduler.queued()
        restoring = tiers.restorer.waiting if tiers is not None else 0
        return Load(
            waiting=len(scheduler.waiting) + restoring,
            running=len(scheduler.running),
            slots=scheduler.slots,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_total=pool.num_blocks,
            blocks_addressed=pool.addressed,
            queued_prefill_tokens=sum(tokens for _, tokens in queued),
            priorities=by_priority(queued),
            prompt_tokens_total=self.prompt_tokens_total,
            hit_tokens_total=self.hit_tokens_total,
            fed_tokens_total=self.fed_tokens_total,
            generated_tokens_total=self.generated_tokens_total,
            preemptions_total=scheduler.preemptions,
            evictions_total=pool.evictions,
            tiers=tiers.loads() if tiers is not None else {},
            oldest_wait_s=max((now - one.enqueued for one in scheduler.waiting if not one.started), default=0),
        )
