"""What each tenant costs this engine: the seconds of its steps, shared by the tokens that each step ran on. Pure.

    step of 0.1 s: 900 tokens of a's prompts, 100 of b's  ──▶  a 0.09 s, b 0.01 s

The engine's thread owns it. A step adds to one integer per sequence; seconds are shared out once per step.
"""

from __future__ import annotations

from collections.abc import Mapping

MOST_TENANTS = 64
OTHER = "other"  # all tenants after the first so many: labels must stay few
FIRST = ("public",)


class TenantAccount:
    """Of one tenant, since the start. `step_tokens` are of the step under way."""

    __slots__ = ("cached_tokens", "engine_seconds", "generated_tokens", "prompt_tokens", "step_tokens")

    def __init__(self) -> None:
        self.step_tokens = 0
        self.engine_seconds = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0


class TenantCosts:
    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._accounts = {name: TenantAccount() for name in (*FIRST, OTHER)}

    def of(self, tenant: str) -> TenantAccount:
        """Whose costs are counted there; that of all others once there are too many."""
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) > self._most:
                return self._accounts[OTHER]
            self._accounts = self._accounts | {tenant: (account := TenantAccount())}  # who reads it has the old one
        return account

    def share(self, seconds: float) -> None:
        """A step has ended that took so long."""
        total = 0
        for account in self._accounts.values():
            total += account.step_tokens
        if not total:
            return
        each = seconds / total
        for account in self._accounts.values():
            if account.step_tokens:
                account.engine_seconds += account.step_tokens * each
                account.step_tokens = 0

    def accounts(self) -> Mapping[str, TenantAccount]:
        return self._accounts
