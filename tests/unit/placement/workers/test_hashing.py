"""The compiled chain is `block_hash.chain`, whatever the root and the blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvfleet.placement.workers.prompts import LARGEST_BLOCK, chain
from kvproto import block_hash
from kvproto.block_hash import ForkedRoot

ROOT, OWN = b"r" * 16, bytes(range(16))
roots = st.just(ROOT) | st.builds(ForkedRoot, st.just(ROOT), st.just(OWN), st.integers(0, 5))


@given(
    root=roots,
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=120),
    block_size=st.integers(1, LARGEST_BLOCK + 4),
)
def test_it_is_the_chain_that_workers_compute(root: block_hash.Root, ids: list[int], block_size: int) -> None:
    found = chain(root, ids, block_size)
    assert [row.tobytes() for row in found] == block_hash.chain(root, ids, block_size)


def test_a_long_prompt() -> None:
    ids = tuple(n * 7919 % 2**32 for n in range(30_470))
    assert [row.tobytes() for row in chain(OWN, ids, 16)] == block_hash.chain(OWN, ids, 16)
