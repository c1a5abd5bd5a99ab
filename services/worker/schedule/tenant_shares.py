"""How much each tenant has been served, so that one which floods the worker cannot starve another. Pure.

A virtual token counter per tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each token
that the model is run on for a tenant counts one, once. Cached tokens and those computed again after a preemption count
nothing. Among equals the tenant served least goes next: two tenants that both want more than they get are thus served
alike. Nobody saves up: a tenant that comes back after a silence starts level with the least served of those that are
busy, and when nobody is left all is forgotten.
"""

from __future__ import annotations

FORGET_FROM = 64  # tenants without work whose counters are kept


class TenantShare:
    """One tenant's counter. `sequences` of it wait or run."""

    __slots__ = ("sequences", "served")

    def __init__(self) -> None:
        self.served = 0
        self.sequences = 0


class TenantShares:
    """Tenants with sequences in the scheduler, and those that left with more than their share."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    def __len__(self) -> int:
        return len(self._shares)

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
        """A sequence of `tenant` neither waits nor runs any more."""
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
