"""What each tenant costs an engine. Pure.

step of 0.1 s: 900 tokens of a's prompts, 100 of b's  ──▶  a 0.09 s, b 0.01 s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_TENANTS = 64
OTHER = "other"  # all tenants after the first so many: labels must stay few
FIRST = ("public",)


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
