"""Where a model is tried before it is served: what its configuration names, its end, and between."""

from __future__ import annotations

from typing import Any

import pytest

from kvfleet.worker.model.support import MOST_TRIED, trial_positions


class Config:
    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def to_dict(self) -> dict[str, Any]:
        return self._settings


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 100},
        {"rope_parameters": {"original_max_position_embeddings": 100}},
        {"rope_parameters": {"full_attention": {"original_max_position_embeddings": 100}}},
        {"attention_chunk_sizes": [7, 100]},
    ],
)
def test_both_sides_of_every_length_that_is_named(settings: dict[str, Any]) -> None:
    assert {99, 100, 101} <= set(trial_positions(Config(**settings), 4096))


def test_the_ends_and_powers_between() -> None:
    assert trial_positions(Config(hidden_size=768, use_window=True), 100) == (0, 1, 2, 4, 16, 64, 99)


def test_nothing_at_or_past_the_context() -> None:
    assert trial_positions(Config(max_position_embeddings=64), 64) == (0, 1, 2, 4, 16, 63)
    assert trial_positions(Config(max_position_embeddings=4096), 1) == (0,)


def test_many_lengths_cost_no_long_trial() -> None:
    found = trial_positions(Config(windows=list(range(100, 10_000, 50))), 16_384)
    assert len(found) == MOST_TRIED
    assert found[:3] == (0, 1, 2)
    assert found[-1] == 16_383
    assert list(found) == sorted(set(found))
