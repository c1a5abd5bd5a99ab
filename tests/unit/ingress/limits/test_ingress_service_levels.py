"""Gaps between tokens, goodput, and labels that stay few."""

from __future__ import annotations

import pytest

from kvfleet.ingress.limits.service_levels import MAX_MODELS, OTHER, ServiceLevel, ServiceLevels, Targets

TARGETS = Targets(ttft_s=1.0, itl_s=0.05)


def test_every_gap_counts_and_tokens_that_come_together_have_none() -> None:
    level = ServiceLevel()
    level.came(None, 1, 1)  # the first token waited for nobody
    level.came(0.02, 1, 1)
    level.came(0.4, 3, 1)
    assert level.itl.count == 4
    assert level.itl.sum == pytest.approx(0.42)
    buckets = dict(level.itl.read()[0])
    assert buckets["0.0005"] == 2  # two of the three that came at once
    assert buckets["0.02"] == 3
    assert buckets["0.5"] == 4


def test_the_first_tokens_can_come_together_too() -> None:
    level = ServiceLevel()
    level.came(None, 4, 1)
    assert (level.itl.count, level.itl.sum) == (3, 0.0)


def test_each_choice_waited() -> None:
    level = ServiceLevel()
    level.came(None, 4, 4)
    level.came(0.02, 4, 4)
    assert level.itl.count == 4
    assert level.itl.sum == pytest.approx(0.08)
    level.came(0.02, 2, 4)  # two of them have ended
    assert level.itl.count == 6


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "finished", "expected"),
    [
        (0.5, 0.01, True, (0, 0, 1, 10)),
        (1.0, 0.05, True, (0, 0, 1, 10)),  # within means up to
        (0.5, None, True, (0, 0, 1, 10)),  # of one token
        (1.5, 0.01, True, (1, 0, 0, 0)),
        (0.5, 0.06, True, (0, 1, 0, 0)),
        (1.5, 0.06, True, (1, 1, 0, 0)),
        (0.5, 0.01, False, (0, 0, 0, 0)),  # it failed, though in time
        (None, None, False, (1, 0, 0, 0)),
    ],
)
def test_a_request_is_good_when_it_met_both_targets(
    ttft_s: float | None, itl_s: float | None, finished: bool, expected: tuple[int, int, int, int]
) -> None:
    level = ServiceLevel()
    level.judge(TARGETS, ttft_s, itl_s, 10, finished=finished)
    assert level.judged == 1
    assert (level.missed_ttft, level.missed_itl, level.good_requests, level.good_tokens) == expected


def test_served_models_are_there_before_their_first_request_and_stay() -> None:
    served = ["a"]
    levels = ServiceLevels(TARGETS, ("chat", "generate"), lambda: served)
    assert levels.all().keys() == {("a", "chat"), ("a", "generate")}
    levels.of("a", "chat").judged = 3
    served[:] = ["b"]
    assert levels.all()["a", "chat"].judged == 3
    assert ("b", "generate") in levels.all()


def test_too_many_models_are_one() -> None:
    levels = ServiceLevels(TARGETS, ("chat",), tuple)
    for number in range(MAX_MODELS):
        levels.of(f"m{number}", "chat")
    one, another = levels.of("one-more", "chat"), levels.of("and-another", "chat")
    assert one is another is levels.of(OTHER, "chat")
    assert len(levels.all()) == MAX_MODELS + 1
    assert levels.of("m3", "chat") is levels.all()["m3", "chat"]
