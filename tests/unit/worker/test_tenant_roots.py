"""Tenants' chains never meet, except over blocks of a prefix that the operator registered as public."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvproto.block_hash import ForkedRoot, chain, child, parent_of
from kvproto.messages import Bundle, Sampling
from services.worker.sequence import SequenceSpec
from services.worker.tenant_roots import TenantRoots
from tests.unit.worker.engine_rig import Transcript, make_engine

SYSTEM = tuple(range(1, 9))  # two blocks of four
BUNDLE = Bundle("m", "", None, None, None, (), 512, 1000, model_revision="r", block_size=4, public_prefixes=(SYSTEM,))


def roots(key: bytes = b"key") -> TenantRoots:
    return TenantRoots(BUNDLE, key)


def hashes(tenant: str, ids: tuple[int, ...], key: bytes = b"key") -> list[bytes]:
    return chain(roots(key).of(tenant, ids), ids, 4)


def test_without_a_public_prefix_nothing_is_shared() -> None:
    ids = tuple(range(100, 116))
    assert not set(hashes("a", ids)) & set(hashes("b", ids))
    assert hashes("a", ids) == hashes("a", ids)
    assert hashes("a", ids) != hashes("a", ids, key=b"another fleet")


def test_a_public_prefix_is_shared_and_the_first_block_past_it_is_not() -> None:
    ids = (*SYSTEM, *range(100, 108))
    a, b = hashes("a", ids), hashes("b", ids)
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])


def test_a_part_of_it_is_not_public() -> None:
    assert hashes("a", SYSTEM[:4])[0] != hashes("b", SYSTEM[:4])[0]


@given(st.lists(st.integers(0, 99), max_size=40), st.integers(0, 6))
def test_a_chain_can_be_extended_block_by_block(ids: list[int], fork: int) -> None:
    root = ForkedRoot(b"p" * 16, b"o" * 16, fork)
    known: list[bytes] = []
    for index in range(len(ids) // 4):
        known.append(child(parent_of(root, known, index), ids[index * 4 : index * 4 + 4]))
    assert known == chain(root, ids, 4)


def test_the_engine_shares_the_public_blocks_between_tenants_and_no_more() -> None:
    engine = make_engine(block_size=4)
    ids = (*SYSTEM, 50, 51, 52, 53, 54)

    def run(request: str, tenant: str) -> int:
        sampling = Sampling(6, temperature=0.0)
        engine.add(SequenceSpec(request, 0, ids, sampling, roots().of(tenant, ids)))
        transcript = Transcript().run(engine)
        return transcript.started[request, 0].cached_tokens

    assert run("r1", "a") == 0
    assert run("r2", "b") == len(SYSTEM), "the system prompt, not what tenant a asked"
    assert run("r3", "a") == len(ids) - 1
    engine.check_integrity()
