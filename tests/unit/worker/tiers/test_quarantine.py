"""Who fails checks is left alone for a while, longer each time, and comes back by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.tiers.source import (
    FAULTS,
    FIRST_TERM_S,
    FORGIVEN_S,
    LONGEST_TERM_S,
    MAX_SOURCES,
    WINDOW_S,
    WRONG,
    Quarantine,
)


def shut_out(quarantine: Quarantine, source: str, now: float) -> None:
    assert [quarantine.fault(source, "checksum", now) for _ in range(FAULTS)][-1]


def term_of(quarantine: Quarantine, source: str, now: float) -> float:
    """Seconds still to go."""
    return quarantine._conducts[source].until - now


def test_a_rate_of_faults_shuts_out_and_single_ones_do_not() -> None:
    quarantine = Quarantine()
    for at in range(20):  # one in a while: RAM has its bad days
        assert not quarantine.fault("v1", "checksum", at * WINDOW_S)
        assert quarantine.allows("v1", at * WINDOW_S)
    assert not quarantine.fault("v2", "checksum", 0.0)
    assert not quarantine.fault("v2", "format", 1.0)
    assert quarantine.fault("v2", "other", 2.0)
    assert not quarantine.allows("v2", 2.0)
    assert not quarantine.allows("v2", 2.0 + FIRST_TERM_S - 0.01)
    assert quarantine.allows("v2", 2.0 + FIRST_TERM_S)
    assert quarantine.allows("v1", 2.0), "others are not meant"


def test_a_wrong_block_under_a_right_checksum_is_enough() -> None:
    quarantine = Quarantine()
    assert quarantine.fault("v1", WRONG, 5.0)
    assert not quarantine.allows("v1", 5.0 + FIRST_TERM_S / 2)
    assert not quarantine.allows("v1", 5.0 + FIRST_TERM_S - 0.01)
    assert not quarantine.fault("v1", WRONG, 6.0), "it is out already: the term is not begun anew"
    assert quarantine.allows("v1", 5.0 + FIRST_TERM_S)


def test_terms_double_up_to_an_hour_and_are_forgiven() -> None:
    quarantine, now, terms = Quarantine(), 0.0, []
    for _ in range(9):
        shut_out(quarantine, "v1", now)
        terms.append(term_of(quarantine, "v1", now))
        now += terms[-1]
        assert quarantine.allows("v1", now)
    assert terms[:4] == [FIRST_TERM_S, 2 * FIRST_TERM_S, 4 * FIRST_TERM_S, 8 * FIRST_TERM_S]
    assert terms[-1] == LONGEST_TERM_S
    now += FORGIVEN_S + 1
    shut_out(quarantine, "v1", now)
    assert term_of(quarantine, "v1", now) == FIRST_TERM_S


def test_faults_of_a_fetch_that_was_under_way_do_not_lengthen_a_term() -> None:
    quarantine = Quarantine()
    shut_out(quarantine, "v1", 0.0)
    for at in range(50):
        assert not quarantine.fault("v1", "checksum", at / 10)
    assert quarantine.allows("v1", FIRST_TERM_S)
    assert not quarantine.fault("v1", "checksum", FIRST_TERM_S), "it begins again with no faults"


def test_what_is_kept_is_bounded() -> None:
    quarantine = Quarantine()
    quarantine.fault("worst", WRONG, 1e6)
    for at in range(MAX_SOURCES + 100):
        quarantine.fault(f"p{at}", "checksum", float(at))
    assert len(quarantine._conducts) == MAX_SOURCES
    assert not quarantine.allows("worst", 1e6), "who is out is forgotten last"


@given(st.lists(st.tuples(st.floats(0, 300), st.booleans()), max_size=60))
def test_nobody_is_out_without_cause_or_for_ever(events: list[tuple[float, bool]]) -> None:
    quarantine, now, faults, outs = Quarantine(), 0.0, 0, 0
    for seconds, distrusted in events:
        now += seconds
        if distrusted:
            outs += quarantine.fault("v", WRONG, now)
            assert not quarantine.allows("v", now)
        else:
            faults += 1
            outs += quarantine.fault("v", "checksum", now)
        assert term_of(quarantine, "v", now) <= LONGEST_TERM_S + 1e-6
    if faults < FAULTS and not any(distrusted for _, distrusted in events):
        assert outs == 0
    assert quarantine.allows("v", now + LONGEST_TERM_S + 1e-6)
