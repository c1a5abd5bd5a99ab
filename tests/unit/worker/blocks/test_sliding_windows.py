"""Models that attend to a window: blocks out of reach are let go, stay cached, and can be evicted."""

from __future__ import annotations

import pytest
from engine_rig import ROOT, Transcript, WindowedRunner, expected_tokens, make_engine, spec

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.pool_integrity import check_integrity
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.schedule.scheduler import Scheduler
from kvproto import block_hash
from kvproto.errors import OutOfMemory
from kvproto.messages import Sampling, Tier
from tests.support.id_detokenizer import IdDetokenizer


def windowed_engine(window: int, blocks: int, block_size: int = 4, budget: int = 64, slots: int = 8) -> Engine:
    runner = WindowedRunner(
        window=window, num_blocks=blocks, block_size=block_size, vocab_size=1000, context_length=2000
    )
    return make_engine(runner=runner, token_budget=budget, slots=slots)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 11])
def test_a_sequence_far_longer_than_the_pool_runs(window: int, block_size: int) -> None:
    blocks = -(-(window - 1) // block_size) + 1  # the window, wherever it begins in a block, and the next token
    engine, transcript = windowed_engine(window, blocks, block_size), Transcript()
    sampling = Sampling(60, temperature=0.0)
    engine.add(spec("long", range(150), sampling=sampling))
    while engine.has_work:
        transcript.take(engine.step())
        engine.check_integrity()
    assert transcript.tokens["long", 0] == expected_tokens(range(150), sampling, window=window)
    assert engine.scheduler.preemptions == 0


def test_a_running_sequence_holds_its_window_only() -> None:
    engine = windowed_engine(window=8, blocks=64)
    engine.add(spec("r", range(100), max_tokens=50))
    used = []
    for _ in range(40):
        engine.step()
        engine.check_integrity()
        used.append(engine.pool.used)
    assert max(used[2:]) == 3
    (sequence,) = engine.scheduler.running
    assert sequence.blocks[: sequence.passed] == [-1] * sequence.passed
    assert sequence.passed == (sequence.computed - 8 + 1) // 4 > 25


def test_what_was_let_go_is_still_found() -> None:
    engine = windowed_engine(window=8, blocks=64)
    engine.add(spec("first", range(40), max_tokens=20))
    transcript = Transcript().run(engine)
    history = [*range(40), *transcript.tokens["first", 0]]
    engine.add(spec("second", [*history, 1, 2], max_tokens=5))
    transcript = Transcript().run(engine)
    assert transcript.started["second", 0].cached_tokens == 59
    assert transcript.tokens["second", 0] == expected_tokens([*history, 1, 2], Sampling(5, temperature=0.0), window=8)


def test_what_was_let_go_makes_room_for_others() -> None:
    """The long one lets go of 25 blocks; the others need them while it still runs."""
    engine, transcript = windowed_engine(window=8, blocks=30), Transcript()
    long = Sampling(60, temperature=0.0)
    engine.add(spec("long", range(100), sampling=long))
    for _ in range(3):
        transcript.take(engine.step())
    assert engine.pool.cached >= 20
    for at in range(4):
        engine.add(spec(f"r{at}", range(200 + at, 230 + at)))
    transcript.run(engine)
    assert engine.pool.evictions > 0
    assert engine.scheduler.preemptions == 0
    assert transcript.tokens["long", 0] == expected_tokens(range(100), long, window=8)
    for at in range(4):
        expected = expected_tokens(range(200 + at, 230 + at), Sampling(8, temperature=0.0), window=8)
        assert transcript.tokens[f"r{at}", 0] == expected


def test_a_window_that_no_pool_block_can_hold_is_refused() -> None:
    engine = windowed_engine(window=40, blocks=8)
    with pytest.raises(OutOfMemory, match="11 blocks are needed, this worker has 8"):
        engine.add(spec("r", range(100)))
    engine.add(spec("short", range(20)))
    assert len(Transcript().run(engine).ends) == 1


def test_scheduler_and_runner_must_agree_on_the_window() -> None:
    pool = BlockPool(8, 4)
    with pytest.raises(ValueError, match="lets go of blocks after 8 tokens, the runner reads None"):
        Engine(FakeRunner(num_blocks=8, block_size=4), pool, Scheduler(pool, window=8), IdDetokenizer())


# ---------------------------------------------------------------------- the pool


def chain_of(pool: BlockPool, ids: list[int]) -> list[int]:
    hashes = block_hash.chain(ROOT, ids, pool.block_size)
    blocks = pool.allocate(len(hashes))
    return [pool.fill(block, ROOT, hashes, at, ids[2 * at : 2 * at + 2]) for at, block in enumerate(blocks)]


def windowed_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks, 2)
    pool.windowed = True
    return pool


def test_the_last_idle_block_of_a_chain_goes_before_those_in_front_of_it() -> None:
    pool = windowed_pool(6)
    blocks = chain_of(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    pool.release(blocks[:2])
    assert pool.available == 4
    pool.allocate(2)
    check_integrity(pool)
    assert pool.allocate(1) == [blocks[1]]
    assert len(pool.index.hashes()) == 1  # what continued it cannot be found any more, held or not
    check_integrity(pool)
    pool.release(blocks[2:])
    assert pool.available == 3  # free at once: they have no content that could be found
    check_integrity(pool)


def test_what_hangs_idle_behind_an_evicted_block_is_free() -> None:
    """a (idle) - b (held) - c (idle): with a goes c's only way to be found."""
    pool = windowed_pool(3)
    a, b, c = chain_of(pool, [1, 2, 3, 4, 5, 6])
    pool.release([a])
    pool.release([c])
    assert pool.allocate(1) == [a]
    check_integrity(pool, [[b], [a]])
    assert pool.available == 1
    assert pool.index.hashes() == []
    assert len(pool.take_changes(Tier.DEVICE)[0].runs[0].hashes) == 3


def test_a_block_is_no_leaf_again_once_what_continues_it_is_idle() -> None:
    pool = windowed_pool(3)
    a, b, c = chain_of(pool, [1, 2, 3, 4, 5, 6])
    pool.release([a])
    check_integrity(pool, [[b, c]])
    pool.release([b, c])
    check_integrity(pool, [])
    assert pool.allocate(3) == [c, b, a]
