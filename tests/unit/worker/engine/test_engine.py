"""What the engine owes itself, on the fake runner: what it feeds, holds and counts, and that a failure is contained.

What any engine does is in `tests/engines`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from engine_rig import ROOT, Clock, Transcript, expected_tokens, make_engine, spec

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import (
    Cancelled,
    EngineFailure,
    OutOfMemory,
)
from kvproto.messages import FinishReason, Sampling
from kvsampling.draw import Drawn
from tests.support.id_detokenizer import IdDetokenizer, IdStream

GREEDY8 = Sampling(8, temperature=0.0)


# ---------------------------------------------------------------------- refused


def test_more_than_all_blocks_hold_is_refused() -> None:
    engine = make_engine(blocks=8, context_length=64)
    with pytest.raises(OutOfMemory, match="10 blocks are needed, this worker has 8"):
        engine.add(spec("r", [1] * 40))
    assert not engine.has_work
    engine.check_integrity()


def test_pool_and_runner_must_agree() -> None:
    pool = BlockPool(8, 4)
    with pytest.raises(ValueError, match="differ"):
        Engine(FakeRunner(num_blocks=8, block_size=16), pool, Scheduler(pool), IdDetokenizer())


# ---------------------------------------------------------------------- reused


def test_session_of_six_tokens_goes_on_with_its_tokens_cached() -> None:
    engine = make_engine(block_size=16)
    first, second = Transcript(), Transcript()
    engine.add(spec("turn1", [1, 2, 3, 4], max_tokens=2))
    first.run(engine)
    assert (first.fed, first.started["turn1", 0].cached_tokens) == (5, 0)  # the last token drawn is never fed
    history = [1, 2, 3, 4, *first.tokens["turn1", 0]]
    engine.add(spec("turn2", [*history, 7, 8], max_tokens=1))
    second.run(engine)
    assert second.started["turn2", 0].cached_tokens == 5
    assert second.fed == 3


@pytest.mark.parametrize("turns", [5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_turn_feeds_only_what_is_new(turns: int, block_size: int) -> None:
    engine = make_engine(block_size=block_size, blocks=256, token_budget=64)
    history: list[int] = []
    for turn in range(turns):
        prompt = [*history, *(turn * 10 + at for at in range(7))]
        engine.add(spec(f"turn{turn}", prompt, max_tokens=9))
        transcript = Transcript().run(engine)
        cached = max(len(history) - 1, 0)
        assert transcript.started[f"turn{turn}", 0].cached_tokens == cached
        assert transcript.fed == len(prompt) - cached + 9 - 1
        assert transcript.tokens[f"turn{turn}", 0] == expected_tokens(prompt, Sampling(9, temperature=0.0))
        history = prompt + transcript.tokens[f"turn{turn}", 0]


def test_same_prompt_again_feeds_one_token() -> None:
    engine = make_engine(block_size=4)
    for cached in (0, 15):
        engine.add(spec("r", range(16), max_tokens=1))
        transcript = Transcript().run(engine)
        assert transcript.started["r", 0].cached_tokens == cached
        assert transcript.fed == 16 - cached


def test_what_steps_cost_is_counted_for_whom_it_was() -> None:
    clock = Clock()

    class SlowRunner(FakeRunner):
        def run(self, slices: list[Slice]) -> list[Drawn]:
            clock.now += 0.5
            return super().run(slices)

    runner = SlowRunner(num_blocks=64, block_size=4, vocab_size=1000, context_length=512)
    engine = make_engine(runner=runner, clock=clock)
    engine.add(spec("a", range(12), max_tokens=3, tenant="a"))
    engine.add(spec("b", range(100, 104), max_tokens=1, tenant="b"))
    clock.now += 2.0  # they wait
    Transcript().run(engine)
    a, b = engine.counters.costs.of("a"), engine.counters.costs.of("b")
    assert (a.prompt_tokens, a.cached_tokens, a.generated_tokens) == (12, 0, 3)
    assert (b.prompt_tokens, b.cached_tokens, b.generated_tokens) == (4, 0, 1)
    assert engine.counters.steps_total == 3
    assert engine.counters.busy_seconds_total == pytest.approx(1.5)
    assert b.engine_seconds == pytest.approx(0.5 * 4 / 16), "of the first step; the others were a's alone"
    assert a.engine_seconds + b.engine_seconds == pytest.approx(engine.counters.busy_seconds_total)
    assert (engine.counters.queue_waits.count, engine.counters.queue_waits.sum) == (2, pytest.approx(4.0))
    assert engine.counters.device_hit_tokens_total == 0
    engine.add(spec("c", range(12), max_tokens=1, tenant="a"))
    Transcript().run(engine)
    assert engine.counters.device_hit_tokens_total == a.cached_tokens == 11


def test_fork_of_a_session_shares_blocks_and_copies_the_tail() -> None:
    engine = make_engine(block_size=4, blocks=32)
    engine.add(spec("parent", range(10), max_tokens=1))
    Transcript().run(engine)
    forks = {f"fork{at}": [*range(10), 50 + at, 60 + at] for at in range(4)}
    for name, prompt in forks.items():
        engine.add(spec(name, prompt))
    transcript = Transcript().run(engine)
    for name, prompt in forks.items():
        assert transcript.started[name, 0].cached_tokens == 10
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)


def test_locate_and_read_kv_see_what_is_cached() -> None:
    engine = make_engine(block_size=4)
    engine.add(spec("r", range(10), max_tokens=1))
    Transcript().run(engine)
    tokens, blocks = engine.kv.locate(ROOT, [*range(10), 99])
    assert (tokens, len(blocks)) == (10, 3)
    keys, _ = engine.kv.read_kv(ROOT, [*range(10), 99], 0)
    assert keys.shape == (10, 1, 1)
    assert engine.kv.locate(ROOT, [9]) == (0, [])
    with pytest.raises(IndexError):
        engine.kv.read_kv(ROOT, [1], 1)


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize("state", ["waiting", "running", "paused"])
def test_cancel_ends_it_and_frees_its_blocks(state: str) -> None:
    engine, transcript = make_engine(slots=1), Transcript()
    if state == "waiting":
        engine.add(spec("other", [9]))
    engine.add(spec("r", range(10)))
    transcript.take(engine.step())
    if state == "paused":
        engine.pause("r", 0)
    engine.cancel("nobody", 0)
    engine.cancel("r", 7)
    engine.cancel("r", 0)
    engine.check_integrity()
    transcript.take(engine.step())
    assert isinstance(transcript.ends["r", 0], Cancelled)
    transcript.run(engine)
    assert engine.pool.used == 0


def test_paused_sequence_holds_no_blocks_and_goes_on_where_it_was() -> None:
    engine, transcript = make_engine(block_size=4), Transcript()
    engine.add(spec("r", range(10)))
    for _ in range(3):
        transcript.take(engine.step())
    fed = transcript.fed
    engine.pause("r", 0)
    engine.check_integrity()
    assert not engine.has_work
    assert engine.pool.used == 0
    engine.resume("r", 0)
    transcript.run(engine)
    assert transcript.tokens["r", 0] == expected_tokens(range(10), GREEDY8)
    assert transcript.fed == 17  # what was computed before the pause was found again
    assert fed < transcript.fed
    assert transcript.started["r", 0].cached_tokens == 0


# ---------------------------------------------------------------------- contained


class BrokenText(IdDetokenizer):
    """Fails on the third token of prompts that begin with 13."""

    def stream(self, prompt_ids: Sequence[int]) -> IdStream:
        return _BrokenStream() if prompt_ids[0] == 13 else IdStream()


class _BrokenStream(IdStream):
    pushed = 0

    def push(self, token: int) -> str:
        self.pushed += 1
        if self.pushed == 3:
            raise OverflowError("no such token")
        return super().push(token)


def test_text_that_cannot_be_made_fails_its_request_alone() -> None:
    engine = make_engine(detokenizer=BrokenText())
    engine.add(spec("bad", [13, 1]))
    engine.add(spec("good", [14, 1]))
    transcript = Transcript().run(engine)
    assert isinstance(transcript.ends["bad", 0], EngineFailure)
    assert transcript.tokens["good", 0] == expected_tokens([14, 1], GREEDY8)
    assert engine.pool.used == 0


class BrokenEnd(IdDetokenizer):
    def stream(self, prompt_ids: Sequence[int]) -> IdStream:
        stream = IdStream()
        stream.pending = True
        stream.flush = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        return stream


def test_text_that_cannot_be_ended_or_rebuilt_fails_its_request_alone() -> None:
    engine = make_engine(detokenizer=BrokenEnd())
    engine.add(spec("end", [1]))
    assert isinstance(Transcript().run(engine).ends["end", 0], EngineFailure)
    engine = make_engine(detokenizer=BrokenText())
    with pytest.raises(EngineFailure, match="could not be made text"):
        engine.add(spec("rebuilt", [13], output_ids=(1, 2, 3)))
    assert not engine.has_work
    engine.check_integrity()


class BrokenRunner(FakeRunner):
    """Cannot draw for sequences that begin with 13, and has memory for `most` tokens a step."""

    most = 1_000

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        if sum(len(part.ids) for part in slices) > self.most:
            raise OutOfMemory("the step is too large")
        drawn = super().run(slices)
        first = [self.slots[part.blocks[0] * self.block_size] for part in slices]
        bad = FakeRunner(num_blocks=1, block_size=1)
        bad.run([Slice([13], 0, [0], None)])
        return [EngineFailure("not finite") if v == bad.slots[0] else d for v, d in zip(first, drawn, strict=True)]


def test_draw_that_fails_ends_its_request_alone_and_caches_nothing_of_the_step() -> None:
    engine = make_engine(runner=BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64))
    engine.add(spec("bad", [13, *range(9)]))
    engine.add(spec("good", [14, *range(9)]))
    transcript = Transcript().run(engine)
    assert isinstance(transcript.ends["bad", 0], EngineFailure)
    assert transcript.ends["good", 0] is FinishReason.LENGTH
    assert engine.kv.locate(ROOT, [13, *range(9)])[0] == 0


def test_a_step_out_of_memory_is_computed_in_parts() -> None:
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    runner.most = 10
    engine = make_engine(runner=runner, token_budget=64)
    engine.add(spec("small", [1, 2, 3]))
    engine.add(spec("large", range(20)))
    transcript = Transcript()
    transcript.take(engine.step())  # nobody even loses the step
    for name, prompt in (("small", [1, 2, 3]), ("large", range(20))):
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)[:1]
    engine.check_integrity()
    assert engine.scheduler.pacer.budget.tokens == 16, "the next ones are smaller"
    transcript.run(engine)
    for name, prompt in (("small", [1, 2, 3]), ("large", range(20))):
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)
    assert engine.pool.used == 0


def test_a_token_that_does_not_fit_alone_fails_its_request_and_no_other() -> None:
    class Far(FakeRunner):
        """Has no memory for what attends to more than 20 tokens."""

        def run(self, slices: Sequence[Slice]) -> list[Drawn]:
            if any(part.end > 20 for part in slices):
                raise OutOfMemory("the scores are too large")
            return super().run(slices)

    engine = make_engine(runner=Far(num_blocks=64, block_size=4, vocab_size=1000, context_length=64), token_budget=64)
    engine.add(spec("fed most", range(18), max_tokens=2))
    engine.add(spec("far", [7, 8, 9], max_tokens=40))
    engine.add(spec("small", [1, 2, 3]))
    transcript = Transcript().run(engine)
    assert isinstance(transcript.ends["far", 0], OutOfMemory)
    assert transcript.tokens["far", 0] == expected_tokens([7, 8, 9], Sampling(40, temperature=0.0))[:18]
    for name in ("fed most", "small"):
        assert transcript.ends[name, 0] is FinishReason.LENGTH
    assert engine.pool.used == 0


def test_step_out_of_memory_copies_no_block_twice() -> None:
    """A copy's source may have been overwritten by the time the rest is run again."""
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    engine = make_engine(runner=runner, token_budget=64)
    engine.add(spec("first", range(10), max_tokens=1))
    Transcript().run(engine)
    copies, copy_blocks = [], runner.copy_blocks
    runner.copy_blocks = lambda pairs: (copies.extend(pairs), copy_blocks(pairs))[1]  # type: ignore[method-assign, assignment]
    runner.most = 10
    engine.add(spec("large", range(100, 120)))
    engine.add(spec("small", [*range(10), 55]))
    transcript = Transcript().run(engine)
    assert len(copies) == 1
    assert transcript.tokens["large", 0] == expected_tokens(range(100, 120), GREEDY8)
    assert transcript.tokens["small", 0] == expected_tokens([*range(10), 55], GREEDY8)


def test_decodes_that_do_not_fit_together_are_computed_in_parts() -> None:
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    engine, transcript = make_engine(runner=runner), Transcript()
    prompts = {"a": [1, 2], "long": [3, 4, 5, 6, 7], "b": [8, 9]}
    for name, prompt in prompts.items():
        engine.add(spec(name, prompt))
    transcript.take(engine.step())
    runner.most = 2
    transcript.run(engine)
    for name, prompt in prompts.items():
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)
    assert engine.pool.used == 0


def test_nothing_fits_and_everything_fails_but_the_engine_goes_on() -> None:
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    engine, transcript = make_engine(runner=runner), Transcript()
    runner.most = 0
    for at in range(3):
        engine.add(spec(f"r{at}", [1, at]))
    transcript.take(engine.step())
    assert [type(end) for end in transcript.ends.values()] == [OutOfMemory] * 3
    runner.most = 1_000
    engine.add(spec("later", [1, 2]))
    assert transcript.run(engine).ends["later", 0] is FinishReason.LENGTH


# ---------------------------------------------------------------------- measured


def test_long_prompts_are_cheap_to_keep_books_of() -> None:
    """30,561 tokens: hashing, chunking, matching and releasing take milliseconds, not minutes."""
    engine = make_engine(blocks=2048, block_size=16, token_budget=512, context_length=32_768)
    prompt = [at % 997 for at in range(30_561)]
    for cached in (0, 30_560):
        began = time.perf_counter()
        engine.add(spec("long", prompt, max_tokens=1))
        transcript = Transcript()
        while engine.has_work:
            transcript.take(engine.step())
        assert time.perf_counter() - began < 2.0
        assert transcript.started["long", 0].cached_tokens == cached
    engine.check_integrity()


def test_load_counts() -> None:
    clock = Clock()
    engine = make_engine(slots=1, block_size=4, blocks=16, token_budget=8, clock=clock)
    engine.add(spec("a", range(10)))
    engine.add(spec("b", range(5)))
    transcript = Transcript()
    transcript.take(engine.step())
    load = engine.load()
    assert (load.waiting, load.running, load.slots) == (1, 1, 1)
    assert (load.blocks_used, load.blocks_cached, load.blocks_total) == (3, 0, 16)
    assert load.queued_prefill_tokens == 2 + 1  # a is done with the block that b begins with
    transcript.run(engine)
    load = engine.load()
    assert (load.waiting, load.running, load.blocks_used, load.queued_prefill_tokens) == (0, 0, 0, 0)
    assert load.prompt_tokens_total == 15
    assert load.hit_tokens_total == transcript.started["b", 0].cached_tokens == 4
    assert load.fed_tokens_total == transcript.fed == (10 + 7) + (1 + 7)
    assert load.generated_tokens_total == 16


def test_rates_come_from_steps() -> None:
    clock = Clock()

    class Slow(FakeRunner):
        def run(self, slices: Sequence[Slice]) -> list[Drawn]:
            clock.now += 0.01 * sum(len(part.ids) for part in slices)
            return super().run(slices)

    engine = make_engine(
        runner=Slow(num_blocks=64, block_size=4, vocab_size=1000, context_length=64), clock=clock, token_budget=64
    )
    assert engine.rates().prefill_tokens_per_s == engine.rates().decode_steps_per_s == 0
    engine.add(spec("a", range(20)))
    engine.add(spec("b", range(20, 40)))
    Transcript().run(engine)
    rates = engine.rates()
    assert rates.prefill_tokens_per_s == pytest.approx(100)
    assert rates.decode_steps_per_s == pytest.approx(50)
    assert rates.decode_tokens_per_s == pytest.approx(100)
    assert rates.step_s == pytest.approx(0.4), "readers are told of the longest step, the prefill"
