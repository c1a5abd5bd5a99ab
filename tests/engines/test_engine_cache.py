"""What the engine has computed before: it is found, told, read and forgotten, by content and by tenant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import xor

import pytest
from rigs import EngineRig, greedy, key_of, whole

from kvproto.block_hash import digest_term, in_tier
from kvproto.errors import InvalidRequest
from kvproto.messages import Tier
from tests.support.waiting import until


async def computed(rig: EngineRig, prompt: Sequence[int], request: str = "first") -> tuple[int, ...]:
    """The tokens that the engine has run: the last one drawn is not."""
    stream = await rig.run(rig.spec(request, prompt, greedy(8)))
    return (*prompt, *stream.ids)[:-1]


async def test_a_prompt_that_was_computed_is_cached_for_its_tenant_alone(rig: EngineRig) -> None:
    prompt = rig.prompt(100)
    first = await rig.run(rig.spec("first", prompt, greedy(8)))
    again = await rig.run(rig.spec("again", prompt, greedy(8)))
    theirs = await rig.run(rig.spec("theirs", prompt, greedy(8), root=rig.other_root))
    assert first.cached_tokens == theirs.cached_tokens == 0
    assert whole(99) <= again.cached_tokens <= 99
    assert first.result == again.result == theirs.result
    assert again.started is not None
    assert 0 < sum(again.started.cached_by_tier.values()) <= 100


async def test_a_session_finds_its_last_turn_and_a_fork_what_is_shared(rig: EngineRig) -> None:
    history = await computed(rig, rig.prompt(100))
    assert len(history) == 107
    turn = await rig.run(rig.spec("turn", [*history, *rig.prompt(10, 2)], greedy(4)))
    assert whole(107) <= turn.cached_tokens <= 107
    fork = await rig.run(rig.spec("fork", [*history[:70], *rig.prompt(40, 3)], greedy(4)))
    assert whole(70) <= fork.cached_tokens <= 70


async def test_another_attempt_finds_what_an_earlier_one_computed(rig: EngineRig) -> None:
    spec = rig.spec("r", rig.prompt(60), greedy(80))
    first = await rig.run(spec)
    rest = await rig.run(
        rig.spec("r", spec.prompt_ids, greedy(80), attempt=1, output_ids=first.ids[:70], text_sent=1_000)
    )
    assert rest.ids == first.ids[70:]
    assert rest.started is not None
    assert whole(129) <= rest.started.cached_tokens <= 129
    assert rest.started.recomputed_tokens == 130 - rest.started.cached_tokens
    assert sum(rest.started.cached_by_tier.values()) <= 60


# ---------------------------------------------------------------------- told


def digest(held: Mapping[Tier, Iterable[bytes]]) -> int:
    terms = (in_tier(reduce(xor, map(digest_term, hashes), 0), tier.number) for tier, hashes in held.items())
    return reduce(xor, terms, 0)


async def test_holdings_are_the_blocks_of_what_ran_and_have_the_digest_of_the_events(rig: EngineRig) -> None:
    chains = [await computed(rig, rig.prompt(length, length), f"r{length}") for length in (100, 60, 40)]
    held, told = await rig.engine.holdings()
    for ids in chains:
        assert rig.held_chain(held[Tier.DEVICE], ids) >= whole(len(ids)) // rig.block_size
    assert told == digest(held)
    assert told in rig.recorder.digests

    async def agrees() -> bool:
        return (await rig.engine.holdings())[1] == rig.recorder.events.digest

    for _ in range(100):  # copies to the tier below may be under way
        if await agrees():
            return
    raise AssertionError("the digest of all events is not that of the holdings")


async def test_a_digest_told_under_way_is_one_that_events_led_to(rig: EngineRig) -> None:
    """So a snapshot is complete at one event."""
    specs = [rig.spec(f"r{number}", rig.prompt(40, number), greedy(12)) for number in range(20)]
    for spec in specs:
        rig.submit(spec)
        held, told = await rig.engine.holdings()
        assert told in rig.recorder.digests
        assert told == digest(held)
    await rig.until(*map(key_of, specs))


async def test_an_inspection_says_how_much_is_held(rig: EngineRig) -> None:
    ids = await computed(rig, rig.prompt(100))
    found = await rig.engine.inspect(rig.root, (*ids, 5, 6, 7))
    assert whole(len(ids)) <= found.cached_tokens <= len(ids)
    assert found.tiers[Tier.DEVICE.value] == found.cached_tokens
    for root, asked in ((rig.other_root, ids), (rig.root, rig.prompt(50, 9)), (rig.root, ids[1:])):
        assert (await rig.engine.inspect(root, asked)).cached_tokens == 0


# ---------------------------------------------------------------------- forgotten


async def test_what_is_erased_is_neither_held_nor_found(rig: EngineRig) -> None:
    ids = await computed(rig, rig.prompt(100))
    before = (await rig.engine.inspect(rig.root, ids)).cached_tokens
    assert await rig.engine.erase(rig.other_root, ids, 0) == 0
    assert (await rig.engine.inspect(rig.root, ids)).cached_tokens == before
    await rig.engine.erase(rig.root, ids, len(ids))  # what the last tokens' block shares with no other may go
    assert (await rig.engine.inspect(rig.root, ids)).cached_tokens >= whole(len(ids))
    assert await rig.engine.erase(rig.root, ids, 50) > 0
    assert (await rig.engine.inspect(rig.root, ids)).cached_tokens <= 50
    held, _ = await rig.engine.holdings()
    assert all(rig.held_chain(hashes, ids) <= 50 // rig.block_size for hashes in held.values())
    await rig.engine.erase(rig.root, ids, 0)
    again = await rig.run(rig.spec("again", ids[:100], greedy(4)))
    assert again.cached_tokens == 0


async def test_what_others_continue_is_not_erased(rig: EngineRig) -> None:
    shared = rig.prompt(64)
    one = await computed(rig, [*shared, *rig.prompt(40, 2)], "one")
    other = await computed(rig, [*shared, *rig.prompt(40, 3)], "other")
    before = (await rig.engine.inspect(rig.root, other)).cached_tokens
    assert await rig.engine.erase(rig.root, one, 0) > 0
    assert (await rig.engine.inspect(rig.root, other)).cached_tokens == before
    assert (await rig.engine.inspect(rig.root, one)).cached_tokens <= len(shared)


# ---------------------------------------------------------------------- read


async def test_kv_of_what_is_cached_can_be_read_or_is_refused(rig: EngineRig) -> None:
    ids = await computed(rig, rig.prompt(60))
    if not rig.has_kv:
        with pytest.raises(InvalidRequest):
            await rig.engine.read_kv(rig.root, ids, 0)
        return
    keys, values = await rig.engine.read_kv(rig.root, ids, 0)
    cached = (await rig.engine.inspect(rig.root, ids)).cached_tokens
    assert keys.shape == values.shape
    assert (keys.ndim, keys.shape[0]) == (3, cached)
    keys, _ = await rig.engine.read_kv(rig.other_root, ids, 0)
    assert keys.shape[0] == 0
    with pytest.raises(IndexError):
        await rig.engine.read_kv(rig.root, ids, 1_000)


async def test_load_comes_back_to_what_is_only_cached(rig: EngineRig) -> None:
    await computed(rig, rig.prompt(100))
    await until(lambda: rig.engine.measured[0].blocks_used == 0)
