"""What is saved: full blocks, in the step that completes them, once, as far as slots go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvfleet_vllm.block_moves import SaveBlocks, SaveState
from kvfleet_vllm.cache_groups import CacheGroups
from kvfleet_vllm.save_plan import SavePlan


def table(request: str) -> tuple[list[int], ...]:
    return (list(range(100, 200)),)


def plan(slots: int = 64, save_from: int = 0, tokens: int = 100, size: int = 32) -> tuple[SavePlan, Any]:
    one, request = SavePlan(CacheGroups(size)), SimpleNamespace(request_id="v", num_tokens=tokens)
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


def hybrid(slots: int = 64, save_from: int = 0, tokens: int = 100) -> tuple[SavePlan, Any]:
    """Groups 0 and 1 have states, 2 and 3 attend, the last one within a window."""
    one, request = SavePlan(CacheGroups(32, (2, 3), (0, 1))), SimpleNamespace(request_id="v", num_tokens=tokens)
    one.grant(range(slots))
    one.want(request, "r", save_from)
    return one, request


def tables(request: str) -> list[list[int]]:
    return [[100 * group + at for at in range(10)] for group in range(1, 5)]


def test_blocks_of_groups_and_the_state_where_a_step_ends_with_a_block() -> None:
    one, request = hybrid()
    assert one.step([("v", 64)], tables) == [
        SaveBlocks("r", 0, (300, 400, 301, 401), (0, 1)), SaveState("r", 2, (101, 201), (2,)),
    ]  # fmt: skip
    assert one.step([("v", 100)], tables) == [SaveBlocks("r", 2, (302, 402), (3,))]
    request.num_tokens = 128
    assert one.step([("v", 128)], tables) == [
        SaveBlocks("r", 3, (303, 403), (4,)), SaveState("r", 4, (103, 203), (5,)),
    ]  # fmt: skip


def test_a_state_of_more_tokens_than_are_known_is_not_saved() -> None:
    """Of a step whose last tokens are not told yet."""
    one, _ = hybrid(tokens=64)
    assert one.step([("v", 65)], tables) == [SaveBlocks("r", 0, (300, 400, 301, 401), (0, 1))]
    assert one.step([("v", 96)], tables) == []


def test_a_state_alone_where_the_worker_has_the_blocks() -> None:
    one, _ = hybrid(save_from=3)
    assert one.step([("v", 64)], tables) == [SaveState("r", 2, (101, 201), (0,))]


def test_without_a_slot_for_the_state_the_blocks_are_saved() -> None:
    one, _ = hybrid(slots=2)
    assert one.step([("v", 64)], tables) == [SaveBlocks("r", 0, (300, 400, 301, 401), (0, 1))]


def test_what_vllm_has_let_go_of_ends_the_chain_and_its_states() -> None:
    one, request = hybrid(tokens=128)
    let_go = tables("")
    let_go[3][0] = 0
    assert one.step([("v", 64)], lambda _: let_go) == []
    assert not one.wants("v")
    one.want(request, "r", 0)
    let_go[3][0], let_go[1][1] = 400, 0
    assert [type(save) for save in one.step([("v", 64)], lambda _: let_go)] == [SaveBlocks]
    assert one.wants("v")
