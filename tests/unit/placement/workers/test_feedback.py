"""Who is believed, from what was expected and what came."""

from __future__ import annotations

from kvfleet.placement.workers.feedback import FADE_S, LEAST_REQUESTS, Belief, Feedback


def observe(feedback: Feedback, count: int, actual: int, now: float = 0.0, worker: str = "w") -> list[Belief]:
    beliefs = []
    for _ in range(count):
        feedback.observe(worker, 100, actual, now)
        beliefs.append(feedback.belief(worker))
    return beliefs


def test_one_miss_proves_nothing() -> None:
    assert set(observe(Feedback(), LEAST_REQUESTS - 1, 0)) == {Belief.EXACT}


def test_it_goes_down_step_by_step_and_comes_back_by_itself() -> None:
    feedback = Feedback()
    assert list(dict.fromkeys(observe(feedback, 40, 0))) == [Belief.EXACT, Belief.APPROXIMATE, Belief.LOAD_ONLY]
    assert feedback.observe("w", 100, 0, 0.0) == 0.0
    back = list(dict.fromkeys(observe(feedback, 60, 100)))
    assert back == [Belief.LOAD_ONLY, Belief.APPROXIMATE, Belief.EXACT]
    assert feedback.observe("w", 100, 100, 0.0) == 1.0


def test_half_true_is_half_believed() -> None:
    feedback = Feedback()
    observe(feedback, 60, 50)
    assert feedback.belief("w") is Belief.APPROXIMATE
    assert abs(feedback.observe("w", 100, 50, 0.0) - 0.5) < 0.02


def test_time_heals_a_worker_that_is_given_nothing() -> None:
    feedback = Feedback()
    observe(feedback, 40, 0)
    beliefs, now = [], 0.0
    while feedback.belief("w") is not Belief.EXACT:
        now += 10.0
        feedback.tick(now)
        beliefs.append(feedback.belief("w"))
    assert FADE_S < now < 5 * FADE_S
    assert Belief.APPROXIMATE in beliefs


def test_finding_more_than_was_expected_is_no_fault_and_expecting_nothing_no_evidence() -> None:
    feedback = Feedback()
    for _ in range(50):
        feedback.observe("w", 100, 500, 0.0)
        feedback.observe("w", 0, 0, 0.0)
    assert feedback.of["w"].missing == 0.0
    assert feedback.of["w"].requests == 50
    assert feedback.of["w"].unpredicted_tokens_total == 50 * 400
    feedback.observe("w", 0, 7, 0.0)
    assert feedback.of["w"].unpredicted_tokens_total == 50 * 400 + 7
    assert feedback.of["w"].missing_tokens_total == 0


def test_a_new_life_starts_anew_and_others_are_not_concerned() -> None:
    feedback = Feedback()
    observe(feedback, 40, 0)
    observe(feedback, 40, 100, worker="v")
    assert feedback.belief("v") is Belief.EXACT
    feedback.forget("w")
    assert feedback.belief("w") is Belief.EXACT
