"""Eviction by what came back before: what it keeps that LRU loses, and that it never loses much more than LRU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from engine_rig import ROOT, Transcript, expected_tokens, spec

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.pool_integrity import check_integrity
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.eviction.base import EvictionPolicy
from kvfleet.worker.eviction.gains import LEVELS, gains
from kvfleet.worker.eviction.lru import LruEviction
from kvfleet.worker.eviction.reuse import ReuseEviction
from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.settings import WorkerSettings
from kvproto import block_hash
from kvproto.messages import Sampling
from tests.support.id_detokenizer import IdDetokenizer

SIZE, BLOCKS = 4, 160


def seconds(position: int, tokens: int) -> float:
    """A later token costs more."""
    return tokens * (1 + (position + tokens / 2) / 400)


def reuse() -> ReuseEviction:
    return ReuseEviction(BLOCKS, SIZE, seconds)


def served(prompts: Iterator[list[int]], policy: EvictionPolicy) -> float:
    """Seconds to compute them one after the other."""
    pool, took = BlockPool(BLOCKS, SIZE, policy), 0.0
    for ids in prompts:
        hashes = block_hash.chain(ROOT, ids, SIZE)
        match = pool.match(ROOT, hashes, ids, len(ids) - 1)
        cached = len(match.blocks)
        pool.asked(hashes, (len(ids) - 1) // SIZE, cached)
        pool.acquire(match.blocks)
        blocks = match.blocks + pool.allocate(pool.blocks_for(len(ids)) - cached)
        for at in range(cached, len(hashes)):
            blocks[at] = pool.fill(blocks[at], ROOT, hashes, at, ids[at * SIZE : (at + 1) * SIZE])
        if len(ids) % SIZE:
            pool.keep_tail(blocks[-1], ROOT, hashes, len(hashes), ids[len(hashes) * SIZE :])
        pool.release(blocks)
        check_integrity(pool, [])
        took += seconds(match.tokens, len(ids) - match.tokens)
    return took


def documents_beside_chats(chance: Random, turns: int, documents: float) -> Iterator[list[int]]:
    """A turn goes on with one of six chats; between them documents that are read once."""
    numbers, chats = count(100), [[chat] for chat in range(6)]
    for _ in range(turns):
        if chance.random() < documents:
            yield [next(numbers) for _ in range(chance.randint(60, 160))]
        else:
            chat = chance.choice(chats)
            chat += [next(numbers) for _ in range(chance.randint(5, 15))]
            yield list(chat)
            if len(chat) > 120:
                del chat[1:]


def test_documents_that_are_read_once_do_not_push_chats_out() -> None:
    lru = served(documents_beside_chats(Random(1), 800, 0.5), LruEviction())
    policy = reuse()
    assert served(documents_beside_chats(Random(1), 800, 0.5), policy) < 0.9 * lru
    assert not policy.follows_lru
    assert policy.balance.saved_s > 10 * policy.balance.lost_s


def test_it_is_what_lru_is_until_it_has_seen_enough() -> None:
    """Two turnovers of the pool."""
    prompts = list(documents_beside_chats(Random(2), 8, 0.5))
    policy = reuse()
    assert served(iter(prompts), policy) == served(iter(prompts), LruEviction())
    assert policy.follows_lru
    assert policy.balance.lost_s == 0.0


def turned(chance: Random, turns: int) -> Iterator[list[int]]:
    """What came back never does again, and what never did comes back: the past misleads."""
    yield from documents_beside_chats(chance, turns, 0.5)
    numbers, seen = count(1_000_000), [[5_000_000]]
    for _ in range(turns):
        ids = [next(numbers) for _ in range(chance.randint(60, 120))] if chance.random() < 0.5 else seen[-1]
        seen.append(ids)
        yield ids


@pytest.mark.parametrize("seed", range(2))
def test_where_the_past_misleads_it_soon_follows_lru(seed: int) -> None:
    turning = 800
    policy = reuse()
    lru, ours = served(turned(Random(seed), turning), LruEviction()), served(turned(Random(seed), turning), policy)
    before = [served(documents_beside_chats(Random(seed), turning, 0.5), one) for one in (LruEviction(), reuse())]
    assert ours - before[1] < 1.02 * (lru - before[0])


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_never_come_back_cost_nothing(seed: int) -> None:
    def fresh() -> Iterator[list[int]]:
        chance, numbers = Random(seed), count()
        for _ in range(200):
            yield [next(numbers) for _ in range(chance.randint(1, 100))]

    assert served(fresh(), reuse()) == served(fresh(), LruEviction())


def test_a_deeper_block_is_kept_longer_than_one_that_is_soon_computed() -> None:
    policy = reuse()
    for block, at in ((0, 1), (1, 100)):
        policy.stored(block, bytes([block]) * 16, at, None)
        policy.touch(block, 1)
    policy.follows_lru = False
    policy.offer(1)
    policy.offer(0)
    assert policy.victim() == 0


def test_what_an_engine_generates_does_not_depend_on_it() -> None:
    chance = Random(3)
    runner = FakeRunner(num_blocks=24, block_size=SIZE, vocab_size=1000, context_length=512)
    policy = ReuseEviction(24, SIZE, seconds)
    pool = BlockPool(24, SIZE, policy)
    engine = Engine(runner, pool, Scheduler(pool, token_budget=32, slots=4), IdDetokenizer())
    transcript, prompts = Transcript(), {}
    heads = [[chance.randrange(900) for _ in range(20)] for _ in range(3)]
    for number in range(60):
        prompt = chance.choice(heads) + [chance.randrange(900) for _ in range(chance.randint(1, 20))]
        prompts[f"r{number}"] = prompt
        engine.add(spec(f"r{number}", prompt, max_tokens=5))
        for _ in range(chance.randint(1, 6)):
            transcript.take(engine.step())
            engine.check_integrity()
    transcript.run(engine)
    assert pool.evictions > 0
    assert not policy.follows_lru
    for name, prompt in prompts.items():
        assert transcript.tokens[name, 0] == expected_tokens(prompt, Sampling(5, temperature=0.0))


def test_gains_fall_where_less_comes_back() -> None:
    back = [0.0] * LEVELS
    assert gains(back, 0.0, 100) == gains(back, 0.0, 100)
    soon = [50.0, *back[1:]]
    often, seldom = gains(soon, 0.0, 100), gains(soon, 500.0, 100)
    assert all(one >= other for one, other in zip(often, seldom, strict=True))
    assert often[0] > 5 * often[1], "what comes back soon or never is worth little once that time has passed"
    late = [*back[:7], 50.0, *back[8:]]
    found = gains(late, 10.0, 100)
    assert found[7] > found[0], "what comes back after one turnover is worth most just before"


@pytest.mark.parametrize(("name", "policy"), [("lru", LruEviction), ("reuse", ReuseEviction)])
def test_a_worker_has_the_policy_that_its_settings_name(name: str, policy: type) -> None:
    settings = WorkerSettings(runner="fake", eviction=name, blocks=8, host_bytes=0)
    bundle = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16)
    engine = build_engine(settings, DEMO_FOLDER, bundle)
    assert isinstance(engine.pool._policy, policy)
    transcript = Transcript()
    for number in range(8):
        engine.add(spec(f"r{number}", range(number, number + 60)))
        transcript.run(engine)
    assert len(transcript.ends) == 8
    assert engine.pool.evictions > 0
