"""A sequence that goes on elsewhere: nothing is said of it here, and hardly anything is computed again there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from engine_rig import ROOT, expected_tokens, spec
from tier_rig import SIZE, TieredRig

from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.port.outputs import SequenceStarted
from kvproto.block_hash import chain
from kvproto.messages import Sampling, Tier, Tokens

PROMPT = list(range(100, 109))  # two blocks and a token
GREEDY = Sampling(24, temperature=0.0)
MakeRig = Callable[..., TieredRig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[TieredRig] = []

    def make(**fields: object) -> TieredRig:
        rigs.append(TieredRig(**fields))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def generate_some(rig: TieredRig, count: int) -> list[int]:
    rig.add("a", PROMPT, GREEDY.max_tokens)
    rig.until(lambda: len(rig.transcript.tokens.get(("a", 0), [])) >= count)
    return list(rig.transcript.tokens["a", 0])


def give_blocks(rig: TieredRig, other: TieredRig, ids: list[int], tier: Tier) -> int:
    """What `rig`'s device has of a chain is what `other` can fetch. Returns how many blocks that is."""
    assert other.remote is not None
    hashes = chain(ROOT, ids, SIZE)
    blocks = rig.pool.chain_to(hashes)
    for name, block in zip(names_of(ROOT, hashes, ids, SIZE), blocks, strict=False):
        other.remote.kept[tier][name.hash] = name, bytes(rig.runner.memory.view(block)), False
    return len(blocks)


def go_on(rig: TieredRig, outputs: list[int], *, handed_over: bool) -> SequenceStarted:
    known = [*PROMPT, *outputs]
    assert rig.remote is not None
    names = names_of(ROOT, chain(ROOT, known, SIZE), known, SIZE)
    finding = rig.remote.look(names, exact=False, peer="w1", on_ready=rig.woken.set)
    location = ChainLocation(names, finding, "w1", handed_over)
    rig.engine.add(spec("a", PROMPT, GREEDY.max_tokens, attempt=1, output_ids=tuple(outputs), location=location))
    rig.until(lambda: ("a", 1) in rig.transcript.ends)
    return rig.started["a"]


def test_it_leaves_without_a_word_and_its_blocks_stay(make_rig: MakeRig) -> None:
    rig = make_rig()
    outputs = generate_some(rig, 10)
    rig.engine.let_go([("a", 0)], keep=False)
    rig.engine.check_integrity()
    assert not rig.engine.scheduler.running
    said = [output for result in rig.results for output in result.outputs]
    assert all(isinstance(output, SequenceStarted | Tokens) for output in said)
    assert rig.engine.kv.locate(ROOT, [*PROMPT, *outputs])[0] >= len(PROMPT) + len(outputs) - 1


@pytest.mark.parametrize("produced", [3, 4, 7, 10, 15])
def test_at_most_one_partial_block_is_computed_again(make_rig: MakeRig, produced: int) -> None:
    """Although computing would be quicker than fetching."""
    first = make_rig()
    outputs = generate_some(first, produced)
    first.engine.let_go([("a", 0)], keep=False)
    second = make_rig(remote=True, prefill_tokens_per_s=1e9)
    given = give_blocks(first, second, [*PROMPT, *outputs], Tier.PEER)
    assert given == (len(PROMPT) + len(outputs) - 1) // SIZE
    started = go_on(second, outputs, handed_over=True)
    assert 0 < started.recomputed_tokens <= SIZE
    assert outputs + second.transcript.tokens["a", 1] == expected_tokens(PROMPT, GREEDY)


@pytest.mark.parametrize("produced", [3, 4, 7, 10, 15])
def test_nor_of_a_hybrid_model_which_takes_snapshots_as_it_leaves(make_rig: MakeRig, produced: int) -> None:
    first = make_rig(states=12, host_states=4)
    assert first.slots is not None
    first.slots.every = 128
    generate_some(first, produced)
    first.until(first.engine.kv.leave_soon)
    outputs = list(first.transcript.tokens["a", 0])
    assert len(outputs) <= produced + SIZE
    first.engine.let_go([("a", 0)], keep=False)
    hybrid = {"states": 12, "host_states": 4, "prefill_tokens_per_s": 1e9, "clock": lambda: 0.0}
    second, third = make_rig(remote=True, **hybrid), make_rig(remote=True, **hybrid)
    first.lend(second, [*PROMPT, *outputs])
    assert 0 < go_on(second, outputs, handed_over=True).recomputed_tokens <= SIZE
    expected = expected_tokens(PROMPT, GREEDY, recurrent=True)
    assert outputs + second.transcript.tokens["a", 1] == expected
    give_blocks(first, third, [*PROMPT, *outputs], Tier.PEER)  # the control: without the state
    assert go_on(third, outputs, handed_over=True).recomputed_tokens == len(PROMPT) + len(outputs)
    assert outputs + third.transcript.tokens["a", 1] == expected


@pytest.mark.parametrize("tier", [Tier.PEER, Tier.VAULT])
def test_a_worker_that_has_just_come_has_measured_nobody_yet(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, tier: Tier
) -> None:
    first = make_rig()
    outputs = generate_some(first, 10)
    first.engine.let_go([("a", 0)], keep=False)
    second = make_rig(remote=True, prefill_tokens_per_s=1e9)
    give_blocks(first, second, [*PROMPT, *outputs], tier)
    monkeypatch.setattr(second.remote, "speed", lambda tier: None)
    assert 0 < go_on(second, outputs, handed_over=True).recomputed_tokens <= SIZE


def test_what_was_not_handed_over_is_computed_where_that_is_quicker(make_rig: MakeRig) -> None:
    """The control."""
    first = make_rig()
    outputs = generate_some(first, 10)
    first.engine.let_go([("a", 0)], keep=False)
    second = make_rig(remote=True, prefill_tokens_per_s=1e9)
    give_blocks(first, second, [*PROMPT, *outputs], Tier.PEER)
    assert go_on(second, outputs, handed_over=False).recomputed_tokens == len(PROMPT) + len(outputs)


def test_with_nobody_to_take_over_its_blocks_go_to_vaults(make_rig: MakeRig) -> None:
    rig = make_rig(remote=True, choosy=True)
    outputs = generate_some(rig, 10)
    assert rig.remote is not None
    assert not rig.remote.kept[Tier.VAULT]
    rig.engine.let_go([("a", 0)], keep=True)
    rig.until(lambda: rig.tiers.offloader.is_settled)
    hashes = chain(ROOT, [*PROMPT, *outputs][: len(PROMPT) + len(outputs) - 1], SIZE)
    assert set(hashes) <= set(rig.remote.kept[Tier.VAULT])


def test_an_attempt_that_is_not_there_is_no_fault(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.engine.let_go([("nobody", 3)], keep=True)
    assert rig.run("b", PROMPT) == expected_tokens(PROMPT, Sampling(4, temperature=0.0))
