"""The ledger's last decisions: order, whose they are, and how few are written out at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from placement_build import a_core

from kvfleet.placement.record.ledger import PART, PART_SEEN, Considered, Ledger, LedgerEntry
from kvproto.messages import Actual, Decision, Placement

NOTHING = Considered((), None, np.zeros((4, 0)))


def an_entry(number: int, tenant: str = "acme", model: str = "demo", attempt: int = 0) -> LedgerEntry:
    placement = Placement(f"r{number}", "w0", attempt)
    return LedgerEntry(tenant, model, 1000 + number, placement, 1, NOTHING, 0, 0, 0, b"", 16)


def a_ledger(*entries: LedgerEntry) -> Ledger:
    ledger = a_core("w0").ledger
    for entry in entries:
        ledger.note(entry)
    return ledger


def read(
    ledger: Ledger, limit: int, tenant: str | None = None, model: str | None = None
) -> tuple[list[Decision], list[int]]:
    """All of it, and how many decisions each part had."""
    newest, more, found, parts = ledger.newest(limit, tenant, model), True, [], []
    while more:
        decisions, more = next(newest)
        found += decisions
        parts.append(len(decisions))
    return found, parts


def requests(ledger: Ledger, limit: int, tenant: str | None = None, model: str | None = None) -> list[str]:
    return [one.request for one in read(ledger, limit, tenant, model)[0]]


def test_the_newest_come_first_and_no_more_than_asked_for() -> None:
    ledger = a_ledger(*(an_entry(number) for number in range(20)))
    assert requests(ledger, 3) == ["r19", "r18", "r17"]
    assert requests(ledger, 200) == [f"r{number}" for number in range(19, -1, -1)]
    assert requests(a_ledger(), 5) == []


def test_each_attempt_is_one_and_one_decided_again_is_new() -> None:
    ledger = a_ledger(an_entry(1), an_entry(1, attempt=1), an_entry(2))
    assert [(one.request, one.attempt) for one in read(ledger, 9)[0]] == [("r2", 0), ("r1", 1), ("r1", 0)]
    ledger.note(an_entry(1))
    assert [(one.request, one.attempt) for one in read(ledger, 9)[0]] == [("r1", 0), ("r2", 0), ("r1", 1)]


def test_a_tenant_and_a_model_see_their_own() -> None:
    ledger = a_ledger(
        an_entry(1), an_entry(2, tenant="other"), an_entry(3, model="large"), an_entry(4, tenant="other", model="large")
    )
    assert requests(ledger, 9, "acme") == ["r3", "r1"]
    assert requests(ledger, 1, "other") == ["r4"]
    assert requests(ledger, 9, model="large") == ["r4", "r3"]
    assert requests(ledger, 9, "other", "demo") == ["r2"]
    assert requests(ledger, 9, "nobody") == requests(ledger, 9, "") == []


def test_few_are_written_out_at_a_time_and_few_are_looked_at() -> None:
    ledger = a_ledger(*(an_entry(number, tenant="rare" if number == 0 else "acme") for number in range(3 * PART_SEEN)))
    assert read(ledger, 2 * PART + 1)[1] == [PART, PART, 1]
    assert read(ledger, PART)[1] == [PART], "the last part says that it is the last"
    found, parts = read(ledger, 5, "rare")
    assert ([one.request for one in found], parts) == (["r0"], [0, 0, 1])


def test_what_is_forgotten_between_two_parts_does_no_harm() -> None:
    ledger = a_ledger(*(an_entry(number) for number in range(2 * PART)))
    newest = ledger.newest(2 * PART)
    first, _ = next(newest)
    for number in range(2 * PART):
        ledger.note(an_entry(number))
    second, more = next(newest)
    assert [one.request for one in (*first, *second)] == [f"r{number}" for number in range(2 * PART - 1, -1, -1)]
    assert not more


def test_it_says_what_is_known_when_it_is_read() -> None:
    entry = an_entry(1)
    ledger = a_ledger(entry)
    newest = ledger.newest(5)
    entry.actual = replace(Actual(), accepted=True)
    assert next(newest)[0][0].actual.accepted
