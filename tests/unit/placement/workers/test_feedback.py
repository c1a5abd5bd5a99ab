"""Who is believed, from what was expected and what came."""

from __future__ import annotations

from placement_build import a_core, a_record

from kvfleet.placement.events import WorkerRegistered
from kvfleet.placement.workers.feedback import FADE_S, LEAST_REQUESTS, Belief, Experience


def observe(feedback: Experience, count: int, actual: int, now: float = 0.0) -> list[Belief]:
    beliefs = []
    for _ in range(count):
        feedback.observe(100, actual, now)
        beliefs.append(feedback.belief)
    return beliefs


def test_one_miss_proves_nothing() -> None:
    assert set(observe(Experience(), LEAST_REQUESTS - 1, 0)) == {Belief.EXACT}


def test_it_goes_down_step_by_step_and_comes_back_by_itself() -> None:
    feedback = Experience()
    assert list(dict.fromkeys(observe(feedback, 40, 0))) == [Belief.EXACT, Belief.APPROXIMATE, Belief.LOAD_ONLY]
    assert feedback.observe(100, 0, 0.0) == 0.0
    back = list(dict.fromkeys(observe(feedback, 60, 100)))
    assert back == [Belief.LOAD_ONLY, Belief.APPROXIMATE, Belief.EXACT]
    assert feedback.observe(100, 100, 0.0) == 1.0


def test_half_true_is_half_believed() -> None:
    feedback = Experience()
    observe(feedback, 60, 50)
    assert feedback.belief is Belief.APPROXIMATE
    assert abs(feedback.observe(100, 50, 0.0) - 0.5) < 0.02


def test_time_heals_a_worker_that_is_given_nothing() -> None:
    feedback = Experience()
    observe(feedback, 40, 0)
    beliefs, now = [], 0.0
    while feedback.belief is not Belief.EXACT:
        now += 10.0
        feedback.heal(now)
        beliefs.append(feedback.belief)
    assert FADE_S < now < 5 * FADE_S
    assert Belief.APPROXIMATE in beliefs


def test_finding_more_than_was_expected_is_no_fault_and_expecting_nothing_no_evidence() -> None:
    feedback = Experience()
    for _ in range(50):
        feedback.observe(100, 500, 0.0)
        feedback.observe(0, 0, 0.0)
    assert feedback.missing == 0.0
    assert feedback.requests == 50
    assert feedback.unpredicted_tokens_total == 50 * 400
    feedback.observe(0, 7, 0.0)
    assert feedback.unpredicted_tokens_total == 50 * 400 + 7
    assert feedback.missing_tokens_total == 0


def test_a_new_life_starts_anew_and_others_are_not_concerned() -> None:
    core = a_core("w", "v")
    observe(core.fleet.workers["w"].experience, 40, 0)
    observe(core.fleet.workers["v"].experience, 40, 100)
    assert core.fleet.workers["w"].experience.belief is Belief.LOAD_ONLY
    core.handle(WorkerRegistered(a_record("w", epoch="e2")), 1.0)
    assert {name: worker.experience.belief for name, worker in core.fleet.workers.items()} == {
        "w": Belief.EXACT,
        "v": Belief.EXACT,
    }
