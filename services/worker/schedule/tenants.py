"""What each tenant costs this engine, and how much it has been served, so that none can starve another. Pure.

    step of 0.1 s: 900 tokens of a's prompts, 100 of b's  ──▶  a 0.09 s, b 0.01 s

The engine's thread owns both. A step adds to one integer per sequence; seconds are shared out once per step.
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
    """Of one tenant, since the start. `step_tokens` are of the step under way."""

    step_tokens: int = 0
    engine_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class TenantCosts:
    """Seconds of steps are shared by the tokens that each step ran on."""

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self.accounts: Mapping[str, TenantAccount] = {name: TenantAccount() for name in (*FIRST, OTHER)}

    def of(self, tenant: str) -> TenantAccount:
        """Whose costs are counted there; that of all others once there are too many."""
        account = self.accounts.get(tenant)
        if account is None:
            if len(self.accounts) > self._most:
                return self.accounts[OTHER]
            account = TenantAccount()
            self.accounts = {**self.accounts, tenant: account}  # who reads it has the old one
        return account

    def share(self, seconds: float) -> None:
        """A step has ended that took so long."""
        total = sum(account.step_tokens for account in self.accounts.values())
        for account in self.accounts.values():
            if account.step_tokens:
                account.engine_seconds += account.step_tokens * (seconds / total)
                account.step_tokens = 0


@dataclass(slots=True)
class TenantShare:
    """One tenant's counter. `sequences` of it wait or run."""

    served: int = 0
    sequences: int = 0


class TenantShares:
    """A virtual token counter per tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
    token that the model is run on for a tenant counts one, once; cached tokens and those computed again count nothing.

    Among equals the tenant served least goes next, so two tenants that both want more than they get are served alike.
    No tenant saves up: one that comes back starts level with the least served of those that are busy, and when no
    tenant is left all is forgotten.
    """

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    def enter(self, tenant: str) -> TenantShare:
        """A sequence of `tenant` begins to wait. Returns the counter to charge."""
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
        """Of idle tenants only those served more than `least` have anything to be remembered by."""
        idle = [tenant for tenant, share in self._shares.items() if not share.sequences]
        if len(idle) >= FORGET_FROM:
            for tenant in idle:
                if self._shares[tenant].served <= least:
                    del self._shares[tenant]
