"""Leases of readers: who is gone, who only lost its server for a moment, and who is asked at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.streams.records import AGAIN_S, GONE_S, RECEIPT_PERIOD_S, Leases, Reader
from kvproto.messages import Encoding

BATCH = Reader("_ing.x.b", Encoding.FRAMES)
PLAIN = Reader("_INBOX.y", Encoding.JSON)
BEAT_S = 0.5


def held(*readers: Reader) -> Leases:
    leases = Leases()
    for reader in readers:
        leases.hold(reader)
    return leases


def ask(leases: Leases, now: float) -> list[int]:
    """What the outbox does with what is due."""
    numbers = [leases.receipt(inbox, now) for inbox in leases.due(now)]
    return [number for number in numbers if number is not None]


def test_one_message_a_second_asks_for_a_receipt() -> None:
    leases = held(BATCH)
    asked = [at for at in range(3000) if leases.receipt(BATCH.inbox, at / 1000) is not None]
    assert len(asked) == 4
    assert asked[0] == 0
    assert leases.receipt("_ing.other.b", 9.0) is None
    assert leases.due(2.8) == [], "frames were sent: they asked"
    assert leases.due(2.71 + RECEIPT_PERIOD_S) == [BATCH.inbox]


def test_a_plain_reader_is_sent_nothing_of_its_own() -> None:
    leases = held(PLAIN)
    assert leases.due(100.0) == []
    assert leases.receipt(PLAIN.inbox, 100.0) is not None, "but its frames ask"


def test_whoever_is_gone_is_found_within_four_seconds() -> None:
    leases, now, died = held(BATCH), 0.0, 1.01
    while not leases.gone(now, steady=True):
        for number in ask(leases, now):
            if now >= died:
                leases.on_notice(number, now + 0.001)
        now += BEAT_S
        assert now < 10
    assert GONE_S <= now - died <= 4.0


def test_one_that_comes_back_in_time_is_never_gone() -> None:
    leases, now = held(BATCH), 0.0
    for beat in range(200):
        away = beat % 10 < 5  # 2.5 s away, 2.5 s there
        for number in ask(leases, now):
            if away:
                leases.on_notice(number, now + 0.001)
        now += BEAT_S
        assert leases.gone(now - 0.01, steady=True) == []


def test_nobody_is_gone_while_the_workers_own_connection_is_new() -> None:
    leases, now = held(BATCH), 0.0
    for _ in range(20):
        for number in ask(leases, now):
            leases.on_notice(number, now)
        now += BEAT_S
        assert leases.gone(now, steady=False) == []
    for _ in range(4):
        for number in ask(leases, now):
            leases.on_notice(number, now)
        now += BEAT_S
        assert leases.gone(now, steady=True) == [], "what was noticed before counts for nothing"


def test_a_lease_is_held_by_each_attempt_and_notices_of_old_ones_mean_nothing() -> None:
    leases = held(BATCH, BATCH)
    number = leases.receipt(BATCH.inbox, 0.0)
    assert number is not None
    leases.release(BATCH)
    assert len(leases._leases) == 1
    leases.release(BATCH)
    assert len(leases._leases) == 0
    leases.on_notice(number, 1.0)
    leases.hold(BATCH)
    for at in range(3):
        leases.on_notice(number, 2.0 + at)
    assert leases.gone(9.0, steady=True) == []
    leases.on_notice(10**9, 3.0)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1.0), st.booleans()),
        min_size=1,
        max_size=120,
    )
)
def test_gone_only_after_nobody_listened_all_that_time(beats: list[tuple[float, bool]]) -> None:
    """Whatever the beats: never while a message has been taken within the last 2.5 s."""
    leases, now, taken_at = held(BATCH), 0.0, 0.0
    for step, listens in beats:
        for number in ask(leases, now):
            if listens:
                taken_at = now
            else:
                leases.on_notice(number, now)
        now += step
        if leases.gone(now, steady=True):
            assert now - taken_at >= GONE_S - AGAIN_S
