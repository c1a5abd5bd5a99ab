"""How much each tenant has been served, so that none starves another. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FORGET_FROM = 64  # tenants without work whose counters are kept


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
