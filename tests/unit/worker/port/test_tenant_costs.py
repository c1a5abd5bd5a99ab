"""Steps' seconds by the tokens that they ran on, and no more tenants than labels should have."""

from __future__ import annotations

import pytest

from kvfleet.worker.port.tenant_costs import OTHER, TenantCosts


def test_a_step_is_shared_by_its_tokens() -> None:
    costs = TenantCosts()
    a, b = costs.of("a"), costs.of("b")
    a.step_tokens += 900
    b.step_tokens += 100
    costs.share(0.1)
    assert (a.engine_seconds, b.engine_seconds) == (pytest.approx(0.09), pytest.approx(0.01))
    b.step_tokens += 1
    costs.share(0.02)
    assert (a.engine_seconds, b.engine_seconds) == (pytest.approx(0.09), pytest.approx(0.03))
    costs.share(5.0)  # of a step that ran on nothing
    assert a.engine_seconds + b.engine_seconds == pytest.approx(0.12)


def test_too_many_tenants_are_one() -> None:
    costs = TenantCosts(most=4)
    first = [costs.of(name) for name in "abc"]
    late, later = costs.of("d"), costs.of("e")
    assert late is later is costs.of(OTHER)
    assert costs.of("a") is first[0]
    assert set(costs.accounts) == {"public", OTHER, "a", "b", "c"}


def test_the_default_tenant_and_the_others_are_there_from_the_start() -> None:
    assert {name: one.engine_seconds for name, one in TenantCosts().accounts.items()} == {"public": 0.0, OTHER: 0.0}
