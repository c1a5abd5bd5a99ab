"""How busy the own engine is, as heartbeats tell it. Pure."""

from __future__ import annotations

from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.port.giving_way import by_priority
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.messages import Load


def load_of(scheduler: Scheduler, tiers: Tiers, counters: EngineCounters, now: float) -> Load:
    pool, queued, accounts = scheduler.pool, scheduler.queued(), counters.costs.accounts.values()
    return Load(
        waiting=len(scheduler.waiting) + tiers.waiting,
        running=scheduler.rows,
        slots=scheduler.slots,
        blocks_used=pool.used,
        blocks_cached=pool.cached,
        blocks_total=pool.num_blocks,
        blocks_addressed=pool.index.addressed,
        queued_prefill_tokens=sum(tokens for _, tokens in queued),
        priorities=by_priority(queued),
        prompt_tokens_total=sum(account.prompt_tokens for account in accounts),
        hit_tokens_total=sum(account.cached_tokens for account in accounts),
        fed_tokens_total=counters.fed_tokens_total,
        generated_tokens_total=sum(account.generated_tokens for account in accounts),
        preemptions_total=scheduler.preemptions,
        evictions_total=pool.evictions,
        tiers=tiers.loads(),
        oldest_wait_s=max((now - one.enqueued for one in scheduler.waiting if not one.started), default=0),
        paused=tiers.pauses.waiting,
        brought_blocks_total=tiers.pauses.brought_total,
        given_back_blocks_total=tiers.pauses.given_back_total,
        saved_s_total=tiers.pauses.saved_s_total,
    )
