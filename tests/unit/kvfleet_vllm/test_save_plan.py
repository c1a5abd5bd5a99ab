"""What is saved: full blocks, in the step that completes them, once, as far as slots go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvfleet_vllm.block_moves import SaveBlocks
from kvfleet_vllm.save_plan import SavePlan


def table(request: str) -> list[int]:
    return list(range(100, 200))


def plan(slots: int = 64, save_from: int = 0, tokens: int = 100, size: int = 32) -> tuple[SavePlan, Any]:
    one, request = SavePlan(size), SimpleNamespace(request_id="v", num_tokens=tokens)
    one.grant(range(slots))
    one.want(request, "r", save_from)
    return one, request


@pytest.mark.parametrize("size", [16, 32, 64])
def test_a_prompt_then_a_generated_block(size: int) -> None:
    one, request = plan(size=size)
    whole = 100 // size
    prompt = tuple(range(100, 100 + whole))
    assert one.step([("v", 100)], table) == [SaveBlocks("r", 0, prompt, tuple(range(whole)))]
    saved = []
    for tokens in range(101, 130):
        request.num_tokens = tokens
        saved += one.step([("v", tokens)], table)
    assert [(save.at, save.blocks) for save in saved] == [(at, (100 + at,)) for at in range(whole, 129 // size)]


def test_chunks_of_a_prompt() -> None:
    one, _ = plan(tokens=100)
    saves = [save for tokens in (20, 40, 60, 80, 100) for save in one.step([("v", tokens)], table)]
    assert saves == [SaveBlocks("r", at, (100 + at,), (at,)) for at in range(3)]


@pytest.mark.parametrize(("save_from", "at"), [(0, 0), (1, 1), (2, 2), (3, None), (40, None)])
def test_what_is_wanted_is_saved_also_if_it_was_hit(save_from: int, at: int | None) -> None:
    """All but the last block were hits: the step computes 4 tokens."""
    one, _ = plan(save_from=save_from)
    saves = one.step([("v", 100)], table)
    assert [(save.at, save.blocks[0]) for save in saves] == ([] if at is None else [(at, 100 + at)])


def test_drafts_are_not_saved() -> None:
    one, request = plan(tokens=62)
    assert [save.blocks for save in one.step([("v", 66)], table)] == [(100,)]
    request.num_tokens = 64
    assert [save.blocks for save in one.step([("v", 67)], table)] == [(101,)]


def test_a_preempted_request_is_not_saved_twice() -> None:
    one, request = plan(tokens=64)
    assert len(one.step([("v", 64)], table)) == 1
    request.num_tokens = 97
    assert one.step([("v", 40)], table) == []
    assert one.step([("v", 97)], table) == [SaveBlocks("r", 2, (102,), (2,))]


def test_without_enough_slots_the_chain_ends_for_good() -> None:
    one, request = plan(slots=2, tokens=100)
    assert one.step([("v", 100)], table) == [SaveBlocks("r", 0, (100, 101), (0, 1))]
    one.grant(range(10, 20))
    request.num_tokens = 160
    assert one.step([("v", 160)], table) == []
    other = SimpleNamespace(request_id="w", num_tokens=32)
    one.want(other, "s", 0)
    assert one.step([("v", 160), ("w", 32)], table) == [SaveBlocks("s", 0, (100,), (10,))]


def test_no_slot_is_used_twice() -> None:
    one, _ = plan(slots=4)
    one.want(SimpleNamespace(request_id="w", num_tokens=64), "s", 0)
    saves = one.step([("v", 64), ("w", 64)], table)
    assert [save.slots for save in saves] == [(0, 1), (2, 3)]


def test_of_others_and_of_finished_requests_nothing_is_saved() -> None:
    one, _ = plan()
    assert one.step([("other", 100)], table) == []
    one.stop("v")
    one.stop("never-seen")
    assert one.step([("v", 100)], table) == []


def test_a_worker_that_is_gone_takes_its_slots_and_wants_along() -> None:
    one, request = plan()
    one.forget()
    one.grant((7,))
    assert one.step([("v", 100)], table) == []
    one.want(request, "r", 0)
    assert one.step([("v", 40)], table) == [SaveBlocks("r", 0, (100,), (7,))]
