"""Which cache groups are moved, and which block of which table lies where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvfleet_vllm.cache_groups import NONE, CacheGroups, movable_groups


def found(
    *groups: tuple[str | None, int], reports: bool = True, mode: str = "align", is_moved: bool = True, **changed: Any
) -> CacheGroups:
    cache = {"prefix_match_unit": None, "calculate_kv_scales": False, "use_replayssm": False}
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**{name: changed.get(name, value) for name, value in cache.items()}),
        parallel_config=SimpleNamespace(**parallel | {name: changed[name] for name in changed if "parallel" in name}),
        speculative_config=changed.get("speculative_config"),
    )
    told = [
        {"kind": kind, "block_size": size, "layers": 4, "is_moved": is_moved,
         "state_mode": mode if kind == "mamba" else None}
        for kind, size in groups
    ]  # fmt: skip
    return movable_groups(config, told, reports)


FULL, MLA, WINDOW, STATE = ("full_attention", 32), ("mla_attention", 32), ("sliding_window", 32), ("mamba", 32)


@pytest.mark.parametrize(
    ("groups", "attention", "states"),
    [
        ((FULL,), (0,), ()),
        ((MLA,), (0,), ()),
        ((STATE, STATE, FULL), (2,), (0, 1)),
        ((WINDOW, WINDOW, FULL), (0, 1, 2), ()),
        ((FULL, STATE, WINDOW), (0, 2), (1,)),
        ((MLA, STATE), (0,), (1,)),
    ],
)
def test_which_can_be_moved(
    groups: tuple[tuple[str, int], ...], attention: tuple[int, ...], states: tuple[int, ...]
) -> None:
    one = found(*groups)
    assert one == CacheGroups(32, attention, states)
    assert one.are_several == (len(groups) > 1)


@pytest.mark.parametrize(
    ("groups", "changed", "why"),
    [
        ((), {}, "does not tell"),
        (((None, 0),), {}, "kind None"),
        ((("chunked_local_attention", 32), FULL), {}, "kind chunked_local"),
        ((WINDOW,), {}, "all tokens"),  # none tells how far a cached chain goes
        ((STATE, STATE), {}, "all tokens"),
        ((FULL,), {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ((FULL,), {"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ((FULL,), {"calculate_kv_scales": True}, "calculate_kv_scales"),
        ((FULL, STATE), {"reports": False}, "load that failed"),
        ((FULL, ("mamba", 64)), {}, r"\[32, 64\]"),
        ((FULL, STATE), {"prefix_match_unit": 16}, "within a block"),
        ((FULL, WINDOW), {"speculative_config": object()}, "speculative"),
        ((FULL, WINDOW), {"is_moved": False}, "does not have moved"),
        ((FULL, STATE), {"mode": "none"}, "--mamba-cache-mode align"),
        ((FULL, STATE), {"use_replayssm": True}, "several steps"),
    ],
)
def test_what_cannot_be_moved_exactly_is_not(groups: Any, changed: Any, why: str) -> None:
    one = found(*groups, **changed)
    assert one.tokens == 0
    with pytest.raises(ValueError, match=why):
        raise ValueError(one.why)


def test_one_group_needs_nothing_of_what_several_do() -> None:
    assert found(FULL, reports=False, is_moved=False, speculative_config=object(), prefix_match_unit=16).tokens == 32


def test_blocks_of_all_groups_slot_after_slot_and_a_state_in_whole_slots() -> None:
    tables = [[1, 2, 3], [0, 0, 6], [0, 0, 9], [10, 11, 12], [0, 0, 15]]
    groups = CacheGroups(32, (0, 3), (1, 2, 4))
    assert groups.blocks(tables, 1, 3) == (2, 11, 3, 12)
    assert groups.state_slots == 2
    assert groups.state(tables, 3) == (6, 9, 15, NONE)
    assert groups.state(tables, 2) == (NONE, NONE, NONE, NONE)
    assert CacheGroups(32, (0,), (1, 2)).state(tables, 3) == (6, 9)
    assert CacheGroups(32, (1, 0)).blocks(tables, 1, 3) == (NONE, 2, 6, 3)
    assert CacheGroups().state_slots == 0
