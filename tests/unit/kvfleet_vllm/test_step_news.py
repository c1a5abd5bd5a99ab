"""Steps, hits and preemptions as a worker hears of them, from what vLLM's scheduler shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvfleet_vllm.step_news import StepNews, computed_tokens, is_choice, name_of
from kvfleet_vllm.wire import EngineStep, Scheduled


def vllm_id(name: str) -> str:
    return f"generate-tokens-{name}-0123abcd"


def step(
    scheduled: dict[str, int],
    new: dict[str, int] | None = None,
    resumed: dict[str, int] | None = None,
    running: dict[str, int] | None = None,
    preempted: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput. `new`, `resumed` and `running` tell how many tokens had been computed before."""
    cached = {**(running or {}), **(resumed or {})}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=vllm_id(name), num_computed_tokens=had) for name, had in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[vllm_id(name) for name in cached],
            resumed_req_ids={vllm_id(name) for name in resumed or ()},
            num_computed_tokens=list(cached.values()),
        ),
        num_scheduled_tokens={vllm_id(name): count for name, count in scheduled.items()},
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids={vllm_id(name) for name in preempted} or None,
    )


def add(news: StepNews, name: str, tokens: int, own: bool = True) -> Any:
    request = SimpleNamespace(request_id=vllm_id(name), num_tokens=tokens)
    news.added(request, own)
    return request


@pytest.mark.parametrize(
    ("seen", "sent"),
    [
        ("generate-tokens-r-1-0123abcd", "r-1"),
        ("generate-tokens-one-1234abcd-0123abcd", "one-1234abcd"),  # only the last one is vLLM's
        ("3_generate-tokens-r-0123abcd", "r"),  # a choice
        ("generate-tokens-r", "r"),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        ("cmpl-77", "cmpl-77"),
    ],
)
def test_ids_are_as_they_were_sent(seen: str, sent: str) -> None:
    assert name_of(seen) == sent


def test_a_prompt_in_chunks_then_tokens() -> None:
    news = StepNews()
    add(news, "a", 100)
    assert news.step(step({"a": 40}, new={"a": 32}), 1.0, {}) == [EngineStep(0.0, 1, 40, 40, ()), Scheduled("a", 32, 0)]
    assert news.step(step({"a": 28}, running={"a": 72}), 1.5, {}) == [EngineStep(0.5, 1, 28, 28, ())]
    assert news.step(step({"a": 1}, running={"a": 100}), 1.75, {}) == [EngineStep(0.25, 1, 1, 0, ())]


def test_requests_of_others_count_in_steps_only() -> None:
    news = StepNews()
    add(news, "a", 10)
    add(news, "b", 20, own=False)
    assert news.step(step({"a": 10, "b": 20}, new={"a": 0, "b": 0}), 1.0, {}) == [
        EngineStep(0.0, 2, 30, 30, ()), Scheduled("a", 0, 0),
    ]  # fmt: skip
    assert news.step(step({"a": 1}, running={"a": 10}, preempted=("b",)), 2.0, {}) == [EngineStep(1.0, 1, 1, 0, ())]


@pytest.mark.parametrize("runner", ["first", "second"])
def test_a_preempted_request_is_told_and_scheduled_again(runner: str) -> None:
    news = StepNews()
    one, _ = add(news, "a", 10), add(news, "b", 10)
    news.step(step({"a": 10, "b": 10}, new={"a": 0, "b": 0}), 1.0, {})
    one.num_tokens = 14
    assert news.step(step({"b": 1}, running={"b": 10}, preempted=("a",)), 2.0, {}) == [EngineStep(1.0, 1, 1, 0, ("a",))]
    back = {"new" if runner == "second" else "resumed": {"a": 8}}
    assert news.step(step({"a": 6, "b": 1}, running={"b": 11}, **back), 3.0, {}) == [  # type: ignore[arg-type]
        EngineStep(1.0, 2, 7, 6, ()), Scheduled("a", 8, 0),
    ]  # fmt: skip


def test_preempted_and_back_in_one_step_is_told_in_that_order() -> None:
    news = StepNews()
    add(news, "a", 10)
    news.step(step({"a": 4}, new={"a": 0}), 1.0, {})
    assert news.step(step({"a": 10}, resumed={"a": 0}, preempted=("a",)), 2.0, {}) == [
        EngineStep(1.0, 1, 10, 10, ("a",)), Scheduled("a", 0, 0),
    ]  # fmt: skip


def test_a_preemption_in_a_step_without_tokens_is_told_with_the_next() -> None:
    news = StepNews()
    add(news, "a", 10)
    news.step(step({"a": 10}, new={"a": 0}), 1.0, {})
    assert news.step(step({}, preempted=("a",)), 2.0, {}) == []
    assert news.step(step({"a": 10}, resumed={"a": 0}), 3.0, {}) == [
        EngineStep(0.0, 1, 10, 10, ("a",)),
        Scheduled("a", 0, 0),
    ]


def test_time_without_work_is_not_counted() -> None:
    news = StepNews()
    add(news, "a", 10)
    add(news, "b", 10)
    news.step(step({"a": 10, "b": 10}, new={"a": 0, "b": 0}), 1.0, {})
    news.finished(vllm_id("a"), 1.5)
    assert news.step(step({"b": 1}, running={"b": 10}), 2.0, {}) == [EngineStep(1.0, 1, 1, 0, ())]
    news.finished(vllm_id("b"), 2.25)
    add(news, "c", 10)
    assert news.step(step({"c": 10}, new={"c": 0}), 9.0, {})[0] == EngineStep(0.25, 1, 10, 10, ())
    assert news.step(step({}), 9.5, {}) == []  # it waits for something
    news.finished(vllm_id("c"), 20.0)
    add(news, "d", 10)
    assert news.step(step({"d": 10}, new={"d": 0}), 30.0, {})[0] == EngineStep(0.0, 1, 10, 10, ())


def test_nothing_is_kept_of_finished_requests() -> None:
    news = StepNews()
    for name in ("a", "b"):
        add(news, name, 10)
    news.step(step({"a": 10, "b": 4}, new={"a": 0, "b": 0}), 1.0, {})
    for name in ("a", "b", "never-seen"):
        news.finished(vllm_id(name), 2.0)
    assert not news._live
    assert not news._own
    assert not news._prefilling


def test_restored_tokens_are_told_apart_from_cached_ones() -> None:
    news = StepNews()
    for name in ("a", "b", "c"):
        add(news, name, 100)
    told = news.step(
        step({"a": 4, "b": 36, "c": 68}, new={"a": 96, "b": 64, "c": 32}), 1.0, {vllm_id("a"): 32, vllm_id("c"): 64}
    )
    assert told[1:] == [Scheduled("a", 32, 64), Scheduled("b", 64, 0), Scheduled("c", 32, 0)]  # c's load failed


def test_how_far_each_request_of_a_step_gets() -> None:
    output = step({"a": 4, "b": 1, "c": 9}, new={"a": 96}, resumed={"c": 32}, running={"b": 50})
    assert dict(computed_tokens(output)) == {vllm_id("a"): 100, vllm_id("b"): 51, vllm_id("c"): 41}


def test_choices_of_one_request_are_known() -> None:
    assert is_choice("3_" + vllm_id("r"))
    assert not is_choice(vllm_id("3_r"))
