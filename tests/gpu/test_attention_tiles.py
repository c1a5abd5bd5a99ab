"""How a step is cut into tiles: each token once, each key that it sees once, no more parts than pay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.schedule.step_plan import Slice
from kvgpu.attention import plan
from kvgpu.attention.plan import SHORTEST_PART, Tiles, cut

BLOCK = 16
PARTS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=6)


def tiles_of(
    parts: list[tuple[int, int]], kv_heads: int, group: int, multiprocessors: int
) -> tuple[RaggedBatch, Tiles]:
    slices = [Slice([0] * count, start, range(-(-(start + count) // BLOCK)), None) for start, count in parts]
    batch = RaggedBatch.of(slices, BLOCK)
    return batch, cut(batch, kv_heads, group, multiprocessors)


@given(PARTS, st.integers(1, 8), st.integers(1, 24), st.integers(1, 132))
def test_each_token_and_each_key_once(
    parts: list[tuple[int, int]], kv_heads: int, group: int, multiprocessors: int
) -> None:
    batch, tiles = tiles_of(parts, kv_heads, group, multiprocessors)
    seen: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for table, position, token, count, low, high, _ in tiles.items.tolist():
        assert 0 < count * group <= tiles.rows
        which = int(np.searchsorted(batch.first, token, side="right")) - 1
        assert (table, position - token) == (batch.offsets[which], batch.starts[which] - batch.first[which])
        seen.setdefault((position, token, count), []).append((low, high))
    assert sorted(at for _, token, count in seen for at in range(token, token + count)) == list(range(len(batch.ids)))
    for (position, _, count), ranges in seen.items():
        borders = sorted(ranges)
        assert (borders[0][0], borders[-1][1]) == (0, position + count)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(borders))
        assert len(ranges) == 1 or all(high - low >= SHORTEST_PART // 2 for low, high in borders)


@given(PARTS, st.integers(1, 132))
def test_partial_results_have_places_of_their_own(parts: list[tuple[int, int]], multiprocessors: int) -> None:
    _, tiles = tiles_of(parts, 2, 4, multiprocessors)
    places = sorted(place for place in tiles.items[:, plan.PARTIAL].tolist() if place >= 0)
    assert places == list(range(tiles.partials))
    merged = [range(first, first + count) for _, _, first, count in tiles.merges.tolist()]
    assert sorted(place for places in merged for place in places) == places
    for token, count, first, many in tiles.merges.tolist():
        mine = tiles.items[np.isin(tiles.items[:, plan.PARTIAL], range(first, first + many))]
        assert {(of, length) for of, length in mine[:, [plan.TOKEN, plan.COUNT]].tolist()} == {(token, count)}
        assert many > 1


@pytest.mark.parametrize(("sequences", "least", "most"), [(1, 32, 64), (16, 2, 17), (256, 1, 1)])
def test_few_long_decodes_are_cut_and_many_are_not(sequences: int, least: int, most: int) -> None:
    _, tiles = tiles_of([(16_000, 1)] * sequences, 8, 4, 132)
    parts = len(tiles.items) / sequences
    assert least <= parts <= most
    assert tiles.rows == 16


def test_the_longest_come_first() -> None:
    _, tiles = tiles_of([(10, 1), (900, 1), (300, 1), (20, 30)], 2, 2, 1)
    lengths = tiles.items[:, plan.HIGH] - tiles.items[:, plan.LOW]
    assert (np.diff(lengths) <= 0).all()
