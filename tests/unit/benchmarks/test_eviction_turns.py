"""Requests that the benchmark of eviction makes: the same from run to run, sharing what their shape shares."""

from __future__ import annotations

import pytest

from benchmarks.policies._shapes import SHAPES
from benchmarks.tiers._eviction_turns import BLOCK, MOST_TOKENS, OWN, turns_of

CORPUS = [token % 1000 for token in range(0, 70_000, 7)]


@pytest.mark.parametrize("shape", [*OWN, *SHAPES])
def test_turns_are_repeatable_and_fit(shape: str) -> None:
    turns = turns_of(shape, 60, CORPUS)
    assert [turn.ids for turn in turns] == [turn.ids for turn in turns_of(shape, 60, CORPUS)]
    assert turns
    for turn in turns:
        assert 0 < turn.prompt < len(turn.ids) <= MOST_TOKENS
        assert len(turn.hashes) == len(turn.ids) // BLOCK


def test_documents_are_read_once_and_chats_go_on() -> None:
    turns = turns_of("read_once", 200, CORPUS)
    seen: set[bytes] = set()
    shares = []
    for turn in turns:
        shares.append(sum(block_hash in seen for block_hash in turn.hashes) / len(turn.hashes))
        seen.update(turn.hashes)
    assert sum(share > 0.5 for share in shares) > 60  # chats
    assert sum(share < 0.3 for share in shares) > 60  # documents
