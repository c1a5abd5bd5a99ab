"""What an engine has done since its start. Who runs it owns the numbers; any thread may read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.worker.port.tenant_costs import TenantAccount, TenantCosts
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

    def started(self, account: TenantAccount, tokens: int, cached: int, restored: int, waited: float) -> None:
        """Called once per attempt, for its first choice. `restored` of the `cached` tokens came from lower tiers."""
        self.device_hit_tokens_total += max(cached - restored, 0)
        self.queue_waits.observe(waited)
        account.prompt_tokens += tokens
        account.cached_tokens += cached

    def stepped(self, sequences: int, tokens: int, seconds: float) -> None:
        self.fed_tokens_total += tokens
        self.busy_seconds_total += seconds
        if sequences:
            self.steps_total += 1
            self.costs.share(seconds)
