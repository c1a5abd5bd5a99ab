"""What each tenant costs this engine, and how much it has been served, so that none starves another. Pure.

step of 0.1 s: 900 tokens of a's prompts, 100 of b's  ──▶  a 0.09 s, b 0.01 s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_TENANTS = 64
OTHER = "other"  # all tenants after the first so many: labels must stay few
FIRST = ("public",)
FORGET_FROM = 64  # tenants without work whose counters are kept


@dataclass(slots=True)
class TenantAccount:
    """Since the start; `step_tokens` of the step under way."""

    step_tokens: int = 0
    engine_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class TenantCosts:
    """The engine's thread owns it; others may read `accounts`."""

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self.accounts: Mapping[str, TenantAccount] = {name: TenantAccount() for name in (*FIRST, OTHER)}

    def of(self, tenant: str) -> TenantAccount:
        """The tenant's account; OTHER's once there are too many."""
        account = self.accounts.get(tenant)
        if account is None:
            if len(self.accounts) > self._most:
                return self.accounts[OTHER]
            account = TenantAccount()
            self.accounts = {**self.accounts, tenant: account}  # a reader on another thread has the old one
        return account

    def share(self, seconds: float) -> None:
        """Share a step's seconds by tokens."""
        total = sum(account.step_tokens for account in self.accounts.values())
        for account in self.accounts.values():
            if account.step_tokens:
                account.engine_seconds += account.step_tokens * (seconds / total)
                account.step_tokens = 0


@dataclass(slots=True)
class TenantShare:
    """`sequences` of the tenant wait or run."""

    served: int = 0
    sequences: int = 0


class TenantShares:
    """A virtual token counter per tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
    computed token counts once; cached and recomputed ones count nothing. Among equals the least served tenant goes
    next. No tenant saves up: one that comes back starts level with the least served busy one.
    """

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    def enter(self, tenant: str) -> TenantShare:
        """A sequence begins to wait. Returns the counter to charge."""
        share = self._shares.get(tenant)
        if share is None or not share.sequences:
            least = min((other.served for other in self._shares.values() if other.sequences), default=0)
            if share is None:
                self._forget(least)
                share = self._shares[tenant] = TenantShare()
            share.served = max(share.served, least)
        share.sequences += 1
        return share

    def leave(self, tenant: str) -> None:
        self._shares[tenant].sequences -= 1
        if not any(share.sequences for share in self._shares.values()):
            self._shares.clear()

    def _forget(self, least: int) -> None:
        """Keep only the idle tenants that would come back above `least`."""
        idle = [tenant for tenant, share in self._shares.items() if not share.sequences]
        if len(idle) >= FORGET_FROM:
            for tenant in idle:
                if self._shares[tenant].served <= least:
                    del self._shares[tenant]
