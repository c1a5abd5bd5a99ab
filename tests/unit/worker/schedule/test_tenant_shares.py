"""Counters of what tenants were served."""

from __future__ import annotations

from kvfleet.worker.schedule.tenant_shares import FORGET_FROM, TenantShares


def test_who_comes_back_starts_level_with_the_least_served() -> None:
    shares = TenantShares()
    idle = shares.enter("idle")
    busy = shares.enter("busy")
    busy.served = 1000
    shares.enter("least").served = 400
    idle.served = 10
    shares.leave("idle")
    assert shares.enter("idle").served == 400
    assert shares.enter("new").served == 400


def test_what_was_had_too_much_is_remembered_while_others_are_busy() -> None:
    shares = TenantShares()
    shares.enter("busy").served = 100
    shares.enter("greedy").served = 900
    shares.leave("greedy")
    assert shares.enter("greedy").served == 900


def test_nothing_is_remembered_once_nobody_is_left() -> None:
    shares = TenantShares()
    for _ in range(2):
        shares.enter("one").served = 500
    shares.leave("one")
    assert len(shares._shares) == 1
    shares.leave("one")
    assert len(shares._shares) == 0
    assert shares.enter("one").served == 0


def test_tenants_that_left_do_not_pile_up() -> None:
    shares = TenantShares()
    shares.enter("busy").served = 1
    for at in range(10 * FORGET_FROM):
        shares.enter(f"t{at}")
        shares.leave(f"t{at}")
    assert len(shares._shares) <= FORGET_FROM + 2
