"""What this engine has done since its start. The engine's thread owns the numbers; any thread may read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.worker.port.giving_way import by_priority
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import Sequence
from kvfleet.worker.schedule.tenants import TenantCosts
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.messages import Load
from kvservice.distribution import Distribution

QUEUE_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(eq=False, slots=True)
class EngineCounters:
    steps_total: int = 0
    steps_aborted_total: int = 0  # all of their sequences were cancelled
    busy_seconds_total: float = 0.0  # in steps
    device_hit_tokens_total: int = 0  # of prompts' cached tokens, not restored from below
    fed_tokens_total: int = 0
    queue_waits: Distribution = field(default_factory=lambda: Distribution(QUEUE_WAITS_S))  # until its first step
    costs: TenantCosts = field(default_factory=TenantCosts)

    def started(self, sequence: Sequence, now: float) -> None:
        """Called once per attempt, for its first choice."""
        tokens, cached = len(sequence.ids), sequence.cached_tokens
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

    def load(self, scheduler: Scheduler, tiers: Tiers, now: float) -> Load:
        pool, queued, accounts = scheduler.pool, scheduler.queued(), self.costs.accounts.values()
        return Load(
            waiting=len(scheduler.waiting) + tiers.restorer.waiting,
            running=len(scheduler.running),
            slots=scheduler.slots,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_total=pool.num_blocks,
            blocks_addressed=pool.index.addressed,
            queued_prefill_tokens=sum(tokens for _, tokens in queued),
            priorities=by_priority(queued),
            prompt_tokens_total=sum(account.prompt_tokens for account in accounts),
            hit_tokens_total=sum(account.cached_tokens for account in accounts),
            fed_tokens_total=self.fed_tokens_total,
            generated_tokens_total=sum(account.generated_tokens for account in accounts),
            preemptions_total=scheduler.preemptions,
            evictions_total=pool.evictions,
            tiers=tiers.loads(),
            oldest_wait_s=max((now - one.enqueued for one in scheduler.waiting if not one.started), default=0),
        )
