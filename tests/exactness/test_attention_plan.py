"""A step's attention cut into items: all of it, each piece once, the costly ones first."""

from __future__ import annotations

from collections import defaultdict
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcpu.attention import plan
from kvcpu.attention.attention_call import (
    DECODE,
    ITEM_HEAD,
    ITEM_HIGH,
    ITEM_KIND,
    ITEM_LOW,
    ITEM_PARTIAL,
    ITEM_SLICE,
    PREFILL,
)
from kvcpu.attention.plan import Items, cut
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.schedule.step_plan import Slice

BLOCK = 512
Part = tuple[int, int]  # start, tokens


def batch_of(parts: list[Part]) -> RaggedBatch:
    return RaggedBatch.of(
        [Slice([0] * count, start, range(-(-(start + count) // BLOCK)), None) for start, count in parts], BLOCK
    )


def covered(items: Items, kv_heads: int) -> dict[tuple[int, int], list[int]]:
    """Tokens that the items of each (slice, head) go through, in order."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for item in items.items[np.argsort(items.items[:, ITEM_LOW], kind="stable")].tolist():
        for head in heads_of(item, kv_heads, items.span):
            found[item[ITEM_SLICE], head] += range(item[ITEM_LOW], item[ITEM_HIGH])
    return found


def heads_of(item: list[int], kv_heads: int, span: int) -> range:
    head = item[ITEM_HEAD]
    return range(head, min(kv_heads, head + (span if item[ITEM_KIND] == DECODE else 1)))


def check(parts: list[Part], kv_heads: int, group: int, threads: int, widest: int = 1) -> Items:
    batch = batch_of(parts)
    items = cut(batch, kv_heads, group, threads, widest)
    assert 1 <= items.span <= min(widest, kv_heads)
    wanted = {
        (at, head): list(range(start + 1 if count == 1 else count))
        for at, (start, count) in enumerate(parts)
        for head in range(kv_heads)
    }
    assert covered(items, kv_heads) == wanted
    for item in items.items.tolist():
        assert item[ITEM_KIND] == (DECODE if parts[item[ITEM_SLICE]][1] == 1 else PREFILL)
        rows = (item[ITEM_HIGH] - item[ITEM_LOW]) * group
        assert item[ITEM_KIND] == DECODE or rows <= max(plan.TILE_ROWS, group), "more rows than scratch memory holds"
    check_partials(items, batch)
    costs = [cost(item, parts, group) * len(heads_of(item, kv_heads, items.span)) for item in items.items.tolist()]
    assert costs == sorted(costs, reverse=True)
    assert items.items.flags.c_contiguous
    assert items.splits.flags.c_contiguous
    assert items.slices.tolist() == np.stack([batch.first, batch.starts, batch.offsets], axis=1).tolist()
    return items


def cost(item: list[int], parts: list[Part], group: int) -> int:
    tokens = item[ITEM_HIGH] - item[ITEM_LOW]
    return tokens * group * (1 if item[ITEM_KIND] == DECODE else parts[item[ITEM_SLICE]][0] + item[ITEM_HIGH])


def check_partials(items: Items, batch: RaggedBatch) -> None:
    """Those of one (sequence, head) follow one another in the order of its tokens, and no number is left out."""
    owners: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for item in items.items.tolist():
        owners[item[ITEM_SLICE], item[ITEM_HEAD]].append(item)
    wanted, numbers = set(), []
    for (at, head), own in owners.items():
        ordered = [item[ITEM_PARTIAL] for item in sorted(own, key=lambda item: item[ITEM_LOW])]
        if len(own) == 1 or own[0][ITEM_KIND] == PREFILL:
            assert set(ordered) == {-1}
            continue
        assert ordered == list(range(ordered[0], ordered[0] + len(own)))
        wanted.add((int(batch.first[at]), head, ordered[0], len(own)))
        numbers += ordered
    assert {tuple(split) for split in items.splits.tolist()} == wanted
    assert len(items.splits) == len(wanted)
    assert sorted(numbers) == list(range(items.partials))


PARTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2500), st.just(1)),
        st.tuples(st.integers(0, 300), st.integers(2, 200)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    PARTS,
    st.integers(1, 7),
    st.sampled_from([1, 2, 7, 64, 100]),
    st.integers(1, 16),
    st.sampled_from([1, 7, 256]),
    st.integers(1, 9),
)
def test_every_token_is_visited_once(
    parts: list[Part], kv_heads: int, group: int, threads: int, shortest: int, widest: int
) -> None:
    with mock.patch.object(plan, "SHORTEST_PART", shortest):
        check(parts, kv_heads, group, threads, widest)


def test_a_step_without_decodes_or_without_prefills() -> None:
    assert not len(check([(0, 5), (9, 2)], 2, 1, 2).splits)
    assert (check([(5, 1), (9, 1)], 2, 1, 2).items[:, ITEM_KIND] == DECODE).all()


@pytest.mark.parametrize("group", [1, 7])
def test_one_long_sequence_is_work_for_all_threads(group: int) -> None:
    items = check([(9999, 1)], 1, group, 4)
    assert len(items.items) == 4 * plan.DECODE_SHARES
    assert items.partials == len(items.items)
    assert len(items.splits) == 1


def test_a_long_sequence_beside_short_ones_is_split_and_they_are_not() -> None:
    items = check([(99, 1), (20_000, 1), (300, 1)], 2, 2, 4)
    split = items.items[items.items[:, ITEM_PARTIAL] >= 0]
    assert set(split[:, ITEM_SLICE].tolist()) == {1}
    assert items.items[0, ITEM_SLICE] == 1, "the costliest come first"


def test_equal_sequences_enough_for_all_threads_are_not_split() -> None:
    assert not check([(1000, 1)] * 16, 2, 1, 2).partials


def test_heads_stay_together_where_there_are_items_for_all_threads() -> None:
    assert check([(1000, 1)] * 16, 12, 1, 2, 12).span == 12
    assert check([(1000, 1)] * 16, 12, 1, 2, 8).span == 6, "as even as it can be"
    assert check([(50_000, 1)], 12, 1, 2, 12).span == 12, "a long sequence is cut along its tokens"
    assert check([(100, 1)] * 2, 12, 1, 2, 12).span == 6
    assert check([(100, 1)], 12, 1, 2, 12).span == 3


def test_parts_are_not_shorter_than_they_are_worth() -> None:
    items = check([(5 * plan.SHORTEST_PART - 1, 1)], 1, 1, 64)
    assert len(items.items) == 5
    assert check([(plan.SHORTEST_PART - 1, 1)], 1, 1, 64).partials == 0


def test_prompts_are_cut_along_their_queries() -> None:
    tokens = check([(0, 1000)], 1, 2, 1).items
    assert (tokens[:, ITEM_HIGH] - tokens[:, ITEM_LOW]).max() == plan.TILE_ROWS // 2
    few = check([(500, 6)], 1, 1, 2).items
    assert len(few) == 6, "a short chunk after a long history is work for all threads too"
